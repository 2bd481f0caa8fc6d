"""Stand-ins that scripts give to Megatron."""

from accelerate.utils import AbstractTrainStep, MegatronLMDummyScheduler


def run() -> object:
    made = MegatronLMDummyScheduler(None, 10, 2, foo=1)
    step = AbstractTrainStep("mine")
    return [
        made.total_num_steps,
        made.warmup_num_steps,
        made.kwargs,
        step.name,
        step.get_batch_func(None, False),
    ]


PROCESSES = (1,)
