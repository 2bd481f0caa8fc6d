"""A progress bar on one process."""

from __future__ import annotations

from typing import Any

from accelerate._impl import ambient
from accelerate._impl.surface.messages import message
from hasten.progress import tqdm_bar


def tqdm(*args: Any, main_process_only: bool = True, **kwargs: Any) -> Any:  # Any: tqdm's own arguments and bar
    """tqdm's bar, shown on the local main process only unless asked otherwise."""
    if len(args) > 0 and isinstance(args[0], bool):
        raise ValueError(message("bar_switch_first"))
    return tqdm_bar.tqdm(*args, main_process_only=main_process_only, topology=ambient.start().topology, **kwargs)
