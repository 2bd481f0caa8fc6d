"""The flags of `accelerate launch` (`launch_flags.json`: groups as the original's help shows them), and a namespace as a command line."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any, Final

from accelerate._impl.commands.validating import TEXTS
from accelerate._impl.environment.variables import str_to_bool

# Any in this file: argparse's own options, and values of flags.
REFUSED: Final[dict[str, str]] = TEXTS["refused"]
_GROUPS: Final[dict[str, dict[str, dict[str, Any]]]] = json.loads(Path(__file__).with_suffix(".json").read_text())
_TYPES: Final[dict[str, Any]] = {
    "int": int,
    "float": float,
    "yes_or_no": str_to_bool,
    "yes_or_no_each": lambda words: tuple(str_to_bool(one.strip()) for one in words.split(",")),
}


def _default(how: dict[str, Any]) -> Any:
    value = how.get("default")
    return tuple(value) if isinstance(value, list) else value


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add every flag; what is not given is the original's default, or None."""
    for title, flags in _GROUPS.items():
        group: Any = parser if title == "options" else parser.add_argument_group(title)
        for name, how in flags.items():
            names = dict.fromkeys((f"--{name}", f"--{name.replace('_', '-')}", how.get("short", f"--{name}")))
            options = {key: value for key, value in how.items() if key in ("action", "choices")}
            if kind := _TYPES.get(how.get("type", "")):
                options["type"] = kind
            group.add_argument(*names, dest=how.get("dest", name), default=_default(how), **options)


def words_of(args: argparse.Namespace) -> list[str]:
    """The command line for hasten that a parsed namespace stands for."""
    words: list[str] = []
    for name, how in [flag for flags in _GROUPS.values() for flag in flags.items()]:
        value = getattr(args, how.get("dest", name), None)
        given = name in getattr(args, "nondefault", ()) or value != _default(how)
        if given and value is not None and value is not False and (name, value) != ("num_processes", 0):
            spelled = ",".join(map(str, value)) if isinstance(value, tuple) else value
            each = spelled if isinstance(spelled, list) else [spelled]
            words += [
                f"--{name}={'true' if one is True else one}" for one in each if how.get("action") != "store_false"
            ]
    return [*words, args.training_script, *args.training_script_args]
