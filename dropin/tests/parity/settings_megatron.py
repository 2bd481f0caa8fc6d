"""Stand-ins that scripts give to Megatron."""

from accelerate.utils import AbstractTrainStep, MegatronLMDummyScheduler


def run() -> object:
    scheduler = MegatronLMDummyScheduler(None, 10, 2, foo=1)
    step = AbstractTrainStep("mine")
    return [
        scheduler.total_num_steps,
        scheduler.warmup_num_steps,
        scheduler.kwargs,
        step.name,
        step.get_batch_func(None, False),
    ]


PROCESSES = (1,)
