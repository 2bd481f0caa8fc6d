"""What the process-wide states show."""

from accelerate import Accelerator, PartialState
from accelerate.state import AcceleratorState, GradientState


def run() -> object:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    state = AcceleratorState()
    return [
        repr(state).replace("cpu:0", "cpu"),
        str(state.distributed_type),
        PartialState().num_processes,
        GradientState().num_steps,
        accelerator.use_distributed,
        accelerator.is_last_process,
        state.use_distributed,
        PartialState().device.type,
        GradientState().sync_gradients,
        GradientState().end_of_dataloader,
        GradientState().remainder,
    ]


PROCESSES = (1, 2)
