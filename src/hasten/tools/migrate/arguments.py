"""Advice of `hasten migrate` about arguments that hasten lacks, from the tables that translate settings files."""

from __future__ import annotations

import ast
from collections.abc import Collection
from types import MappingProxyType
from typing import Any, Final

from hasten.config.established import MSAMP, MSAMP_NAMES, nested_names
from hasten.config.layers import nearest, spelled_in_code
from hasten.config.legacy import OLD_NAMES, translate
from hasten.config.schema import SETTABLE
from hasten.config.source import SettingEntry, SettingSource
from hasten.errors import SettingValueError

_SECTIONS: Final = MappingProxyType(
    {
        "FullyShardedDataParallelPlugin": "fsdp_config",
        "DeepSpeedPlugin": "deepspeed_config",
        "MegatronLMPlugin": "megatron_lm_config",
        "TorchDynamoPlugin": "dynamo_config",
        "ParallelismConfig": "parallelism_config",
    }
)
"""Section of a settings file with the same options, by plugin."""
_OWN: Final = MappingProxyType(
    {
        "state_dict_config": "it is determined by state_dict_type; remove it",
        "optim_state_dict_config": "it is determined by state_dict_type; remove it",
        "torch_tp_plugin": "give parallelism_config=ParallelismConfig(tp_size=...)",
        "deepspeed_plugins": "an Accelerator has one engine; create one Accelerator per engine with deepspeed_plugin=",
        "fp16": 'write mixed_precision="fp16"',
    }
)


def advice(owner: str, argument: ast.keyword, known: Collection[str]) -> str:
    """Return the replacement of an argument that hasten's class or method `owner` does not have; empty if unknown."""
    name = argument.arg or ""
    short = name.removeprefix("fsdp_")
    if owner == "FullyShardedDataParallelPlugin" and short in OLD_NAMES:
        return _fsdp(short, argument.value)
    if name in MSAMP_NAMES:
        return f"{MSAMP}; remove it"
    if name in _OWN:
        return _OWN[name]
    path = nested_names(_SECTIONS[owner]).get(name, ()) if owner in _SECTIONS else ()
    if path:
        return f"write {path[-1]}=" if path[-1] in known else f"it is the setting {'.'.join(path)}"
    sections = [info.path[:1] for info in SETTABLE if len(info.path) == 2 and info.path[1] == name]
    if owner == "Accelerator" and sections:
        return f"give {spelled_in_code(sections[0], f'{name}=...')}"
    near = nearest(name, known)
    return f"did you mean {near}?" if near else ""


def _fsdp(name: str, value: ast.expr) -> str:
    """Return the translation of an FSDP1 option, for its value if the script writes it as a literal."""
    if (given := _literal(value)) is None:
        return f"hasten.fsdp_from_fsdp1({{{name!r}: ...}}) translates its value"
    try:
        entries, said = translate(SettingEntry(("fsdp", name), given, SettingSource("code", name), said=name))
    except SettingValueError as error:
        return str(error)
    written = ", ".join(f"{entry.path[-1]}={entry.value!r}" for entry in entries)
    return f"write {written}" if written else f"remove it{f': {said[0]}' if said else ', FSDP2 always does this'}"


def _literal(value: ast.expr) -> Any:  # Any: a value in the script
    """Return the value of a constant, or the name of an enum member; None for a computed value."""
    match value:
        case ast.Constant():
            return value.value
        case ast.Attribute() if value.attr.isupper():
            return value.attr
        case _:
            return None
