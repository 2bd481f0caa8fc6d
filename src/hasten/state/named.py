"""`module:function` as the command line takes it: a function of a module in the current folder or on the path."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from hasten.errors import ConfigError


def find_named(target: str, instead: str) -> Callable[..., Any]:  # Any: the user's own function
    """The function or class that `module:function` names; `instead` says what else may be given.

    Raises: ConfigError when there is no such module or function.
    """
    module_name, _, name = target.partition(":")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        found = import_module(module_name)  # the module that the user named
    except ModuleNotFoundError as error:
        if error.name is None or not module_name.startswith(error.name):
            raise
        raise ConfigError(f"{target}: there is no module {module_name!r}; {instead}.") from error
    made: Callable[..., Any] | None = getattr(found, name, None)
    if not callable(made):
        known = ", ".join(
            sorted(one for one, value in vars(found).items() if callable(value) and not one.startswith("_"))
        )
        raise ConfigError(f"{target}: {module_name} has no function {name!r}; it has {known or 'none'}.")
    return made
