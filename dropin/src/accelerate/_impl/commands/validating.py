"""A parsed command line of `accelerate launch` completed: from the settings file, then from the original's defaults."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any, Final

import torch

from accelerate._impl.settings.config_file import default_config_file, load_config_from_file

# Any in this file: values of flags.
_KINDS: Final = ("cpu", "multi_gpu", "tpu", "use_deepspeed", "use_fsdp")
_SWITCHES: Final = {"MULTI_GPU": "multi_gpu", "DEEPSPEED": "use_deepspeed", "FSDP": "use_fsdp", "XLA": "tpu"}
_TOO_MANY = "You can only use one of `--cpu`, `--multi_gpu`, `--tpu`, `--use_deepspeed`, `--use_fsdp` at a time."
_ONLY_FSDP2 = "You cannot use `--use_parallelism_config` without `--use_fsdp` and `--fsdp_version=2`. "
_READ = json.loads(Path(__file__).with_name("launch_defaults.json").read_text())
DEFAULTS: Final[dict[str, Any]] = {name: tuple(one) if isinstance(one, list) else one for name, one in _READ.items()}
"""What the original's parser gives for flags that were not."""


def _validate_launch_command(args: argparse.Namespace) -> tuple[argparse.Namespace, Any, bool]:
    """Complete the arguments in place; return them, the settings file, and whether the precision came from it.

    Raises: ValueError for flags that exclude each other, and for unknown keys of the file.
    """
    if sum(bool(getattr(args, name, False)) for name in _KINDS) > 1:
        raise ValueError(_TOO_MANY)
    if getattr(args, "use_parallelism_config", False) and not (args.use_fsdp and str(args.fsdp_version) == "2"):
        raise ValueError(_ONLY_FSDP2)
    if args.multi_gpu and args.num_processes is not None and args.num_processes < 2:
        raise ValueError("You need to use at least 2 processes to use `--multi_gpu`.")
    there = args.config_file is not None or Path(default_config_file).is_file()
    saved = load_config_from_file(args.config_file) if there and not args.cpu else None
    from_file = saved is not None and args.mixed_precision is None
    if saved is not None:
        _take(args, vars(saved))
    args.use_cpu = bool(args.cpu or (saved is not None and saved.use_cpu))
    devices = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    otherwise = {"mixed_precision": "no", "num_processes": devices, "num_machines": 1, "dynamo_backend": "no"}
    for name, value in {**otherwise, "num_cpu_threads_per_process": 1, "debug": False}.items():
        if getattr(args, name, None) is None:
            setattr(args, name, value)
    return args, saved, from_file


def _take(args: argparse.Namespace, values: dict[str, Any]) -> None:
    """Write what the file says where the command line says nothing."""
    given = getattr(args, "nondefault", ())
    for name, value in values.items():
        if isinstance(value, dict):
            _take(args, value)
        elif value is not None and name != "use_cpu" and hasattr(args, name) and name not in given:
            setattr(args, name, value)
    switch = _SWITCHES.get(str(getattr(values.get("distributed_type"), "value", "")))
    if switch is not None and not values.get("use_cpu"):
        setattr(args, switch, True)
    if args.gpu_ids is None:
        args.gpu_ids = "all"
