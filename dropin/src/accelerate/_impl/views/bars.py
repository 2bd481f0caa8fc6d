"""A progress bar on one process."""

from __future__ import annotations

from typing import Any

from accelerate._impl import ambient
from hasten.optional import need


def tqdm(*args: Any, main_process_only: bool = True, **kwargs: Any) -> Any:  # Any: tqdm's own arguments and bar
    """tqdm's bar, shown on the local main process only unless asked otherwise."""
    bar = need("tqdm.auto", why="Accelerate's `tqdm` module").tqdm
    if len(args) > 0 and isinstance(args[0], bool):
        raise ValueError(
            "Passing `True` or `False` as the first argument to Accelerate's `tqdm` wrapper is unsupported. "
            "Please use the `main_process_only` keyword argument instead."
        )
    disable = kwargs.pop("disable", False)
    if main_process_only and not disable:
        disable = not ambient.start().is_local_main
    return bar(*args, **kwargs, disable=disable)
