"""sync_gradients is one flag, whoever writes it."""

from accelerate import Accelerator
from accelerate.state import GradientState


def run() -> object:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
    state = accelerator.gradient_state
    state._set_sync_gradients(False)
    sync_flags = [
        state.sync_gradients,
        accelerator.sync_gradients,
        GradientState().sync_gradients,
    ]
    accelerator.sync_gradients = True
    return [
        *sync_flags,
        state.sync_gradients,
        state.num_steps,
        state.adjust_scheduler,
        state.sync_with_dataloader,
    ]


PROCESSES = (1, 2)
