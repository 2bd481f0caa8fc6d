"""A progress bar on one process."""

from typing import Any

from accelerate._impl.environment.packages import is_tqdm_available
from accelerate._impl.surface.messages import message
from accelerate._impl.views.state import PartialState
from hasten.progress import tqdm_bar


# Any: tqdm's own arguments and bar
def tqdm(*args: Any, main_process_only: bool = True, **kwargs: Any) -> Any:
    """tqdm's bar, shown on the local main process only unless asked otherwise."""
    if not is_tqdm_available():
        raise ImportError(message("no_tqdm"))
    if len(args) > 0 and isinstance(args[0], bool):
        raise ValueError(message("bar_switch_first"))
    if main_process_only:
        kwargs["disable"] = (
            kwargs.get("disable", False) or PartialState().local_process_index != 0
        )
    return tqdm_bar.tqdm(*args, main_process_only=False, **kwargs)
