"""What the process-wide states show."""


from accelerate import Accelerator, PartialState
from accelerate.state import AcceleratorState, GradientState


def run() -> object:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    state = AcceleratorState()
    return [
        repr(state),
        str(state.distributed_type),
        PartialState().num_processes,
        GradientState().num_steps,
        accelerator.use_distributed,
        accelerator.is_last_process,
        state.use_distributed,
        str(PartialState().device),
        GradientState().sync_gradients,
        GradientState().end_of_dataloader,
        GradientState().remainder,
    ]


PROCESSES = (1, 2)
