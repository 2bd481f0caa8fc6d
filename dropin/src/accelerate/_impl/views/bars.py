"""A progress bar on one process."""

from __future__ import annotations

from typing import Any

from accelerate._impl import ambient


def tqdm(*args: Any, main_process_only: bool = True, **kwargs: Any) -> Any:  # Any: tqdm's own arguments and bar
    """tqdm's bar, shown on the local main process only unless asked otherwise."""
    try:
        from tqdm.auto import tqdm as bar  # an optional package
    except ImportError as error:
        raise ImportError(
            "Accelerate's `tqdm` module requires `tqdm` to be installed. Please run `pip install tqdm`."
        ) from error
    if len(args) > 0 and isinstance(args[0], bool):
        raise ValueError(
            "Passing `True` or `False` as the first argument to Accelerate's `tqdm` wrapper is unsupported. "
            "Please use the `main_process_only` keyword argument instead."
        )
    disable = kwargs.pop("disable", False)
    if main_process_only and not disable:
        disable = not ambient.start().is_local_main
    return bar(*args, **kwargs, disable=disable)
