"""A state that was reset says so when it is asked."""

from accelerate import Accelerator
from accelerate.state import PartialState


def run() -> object:
    Accelerator(cpu=True)
    state = PartialState()
    PartialState._reset_state()
    try:
        return str(state.device)
    except AttributeError as error:
        return [type(error).__name__, "_reset_state" in str(error)]


PROCESSES = (1,)
