"""States are empty after a reset and can be made again otherwise."""

from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState


def run() -> object:
    Accelerator(cpu=True)
    AcceleratorState._reset_state()
    reset_flags = [
        AcceleratorState._shared_state == {},
        PartialState._shared_state != {},
    ]
    AcceleratorState._reset_state(True)
    reset_flags.append(PartialState._shared_state == {})
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    return [
        *reset_flags,
        accelerator.mixed_precision,
        AcceleratorState().mixed_precision,
        PartialState().initialized,
    ]


PROCESSES = (1, 2)
