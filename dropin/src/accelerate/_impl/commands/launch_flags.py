"""The flags of `accelerate launch`: hasten's settings as the established parser reads them, and a namespace as a command line."""

from __future__ import annotations

import argparse
from typing import Any, Final, get_args

from accelerate._impl.commands.validating import DEFAULTS, TEXTS
from accelerate._impl.enums import DynamoBackend
from hasten.cli.flags import spellings
from hasten.config.established import SWITCHES
from hasten.config.legacy import OLD_NAMES
from hasten.config.schema import SETTABLE, FieldInfo

# Any in this file: argparse's own options, and values of flags.
REFUSED: Final[dict[str, str]] = TEXTS["refused"]
_SWITCH: Final[dict[str, Any]] = {"action": "store_true"}
_WORDED: Final = ("deepspeed", "fsdp", "megatron", "parallelism", "ao")
"""Sections whose yes-or-no flags take a word; hasten reads it, so "False" means no."""


def _read(info: FieldInfo) -> dict[str, Any]:
    """What argparse is told of a setting's flag."""
    if info.is_bool:
        return {} if {*info.path} & {*_WORDED} else _SWITCH
    if info.path in (("xla", "tpu_vm"), ("xla", "tpu_env")):
        return {"action": "append"}
    kinds = [one if isinstance(one, type) else type(one) for one in get_args(info.type) or (info.type,)]
    return {"type": next((kind for kind in (int, float) if kind in kinds), str)}


_FLAGS: Final[dict[str, dict[str, Any]]] = {
    **{name: {} for name in ("config_file", *REFUSED)},
    **{f"fsdp_{name.removeprefix('fsdp_')}": {} for name in OLD_NAMES},
    **dict.fromkeys((*SWITCHES, "use_parallelism_config"), _SWITCH),
    **{info.flag if info.path == ("cpu",) else spellings(info)[-1]: _read(info) for info in SETTABLE},
}
_CHOICES: Final = {**TEXTS["choices"], "dynamo_backend": [one.value.lower() for one in DynamoBackend]}
_SHORT: Final = {info.flag: f"-{info.meta.short}" for info in SETTABLE if info.meta.short}
_ATTRIBUTES: Final = {"tpu_cluster": "tpu_use_cluster"}
"""Where the value of a flag goes that has another name than the flag."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add every flag; what is not given is the original's default, or None."""
    for name, how in _FLAGS.items():
        names = [_SHORT[name]] if name in _SHORT else []
        names += dict.fromkeys((f"--{name}", f"--{name.replace('_', '-')}"))
        dest = _ATTRIBUTES.get(name, name)
        among: dict[str, Any] = {"choices": _CHOICES[name]} if name in _CHOICES else {}
        parser.add_argument(*names, dest=dest, default=DEFAULTS.get(dest), **how, **among)
    parser.add_argument("--no_tpu_cluster", dest="tpu_use_cluster", action="store_false", default=False)


def words_of(args: argparse.Namespace) -> list[str]:
    """The command line for hasten that a parsed namespace stands for."""
    words: list[str] = []
    for name, how in _FLAGS.items():
        value = getattr(args, _ATTRIBUTES.get(name, name), None)
        given = name in getattr(args, "nondefault", ()) or value != DEFAULTS.get(name)
        if given and value is not None and value is not False and (name, value) != ("num_processes", 0):
            each = value if isinstance(value, list) else [value]
            words += [f"--{name}=true" if how is _SWITCH else f"--{name}={one}" for one in each]
    return [*words, args.training_script, *args.training_script_args]
