"""A parsed command line of `accelerate launch` completed: from the settings file, then from the original's defaults."""

from __future__ import annotations

import argparse
import json
import logging
from pathlib import Path
from typing import Any, Final

import torch

from accelerate._impl.settings.config_file import default_config_file, load_config_from_file

# Any in this file: values of flags.
_KINDS: Final = ("cpu", "multi_gpu", "tpu", "use_deepspeed", "use_fsdp")
_SWITCHES: Final = {"XLA": "tpu"} | {one.upper(): f"use_{one}" for one in ("deepspeed", "fsdp", "megatron_lm")}
TEXTS: Final = json.loads(Path(__file__).with_name("launch_variables.json").read_text())


def _validate_launch_command(args: argparse.Namespace) -> tuple[argparse.Namespace, Any, bool]:
    """Complete the arguments in place; return them, the settings file, and whether the precision came from it.

    Raises: ValueError for flags that exclude each other, and for unknown keys of the file.
    """
    if sum(bool(getattr(args, name, False)) for name in _KINDS) > 1:
        raise ValueError(TEXTS["messages"]["too_many"])
    if getattr(args, "use_parallelism_config", False) and not args.use_fsdp:
        raise ValueError(TEXTS["messages"]["only_fsdp"])
    if args.multi_gpu and args.num_processes is not None and args.num_processes < 2:
        raise ValueError("You need to use at least 2 processes to use `--multi_gpu`.")
    there = args.config_file is not None or (Path(default_config_file).is_file() and not args.cpu)
    saved = load_config_from_file(args.config_file) if there else None
    from_file = saved is not None and args.mixed_precision is None
    if saved is not None:
        _take(args, vars(saved))
        if args.num_processes == -1:
            raise ValueError("You need to manually pass in `--num_processes` using this config yaml.")
    args.use_cpu = bool(args.cpu or (saved is not None and saved.use_cpu))
    devices = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    otherwise = {"num_processes": devices, "num_machines": 1, "mixed_precision": "no", "dynamo_backend": "no"}
    unset = {name: value for name, value in otherwise.items() if getattr(args, name, None) is None}
    for name, value in {**unset, "num_cpu_threads_per_process": 1, "debug": False}.items():
        if getattr(args, name, None) is None:
            setattr(args, name, value)
    if unset and saved is None:
        rows = "\n".join(f"\t`--{name}` was set to a value of `{value!r}`" for name, value in unset.items())
        logging.getLogger("accelerate.commands.launch").warning(TEXTS["messages"]["defaults_used"].format(rows))
    return args, saved, from_file


def _take(args: argparse.Namespace, values: dict[str, Any]) -> None:
    """Write what the file says where the command line says nothing."""
    given = getattr(args, "nondefault", ())
    precision = {f"fp8_{name.removeprefix('fp8_')}": value for name, value in (values.get("fp8_config") or {}).items()}
    groups = [one for name, one in values.items() if isinstance(one, dict) and name != "fp8_config"]
    for name, value in [item for group in (values, precision, *groups) for item in group.items()]:
        if value is not None and name != "use_cpu" and hasattr(args, name) and name not in given:
            setattr(args, name, value)
    for name in ("tpu_vm", "tpu_env", "tpu_name", "tpu_zone", "commands", "command_file"):
        if getattr(args, name, None) is None:
            setattr(args, name, values.get(name))
    kind = str(getattr(values.get("distributed_type"), "value", ""))
    several = "multi_gpu" if kind.startswith("MULTI_") and kind != "MULTI_CPU" else None
    switch = _SWITCHES.get(kind, several)
    if switch is not None and not values.get("use_cpu"):
        setattr(args, switch, True)
    args.use_parallelism_config = bool(args.use_parallelism_config or values.get("parallelism_config"))
    if args.gpu_ids is None:
        args.gpu_ids = "all"
