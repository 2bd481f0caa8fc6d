"""The flags of `accelerate launch` (`launch_flags.json`: groups as the original's help shows them), completed and as words."""

from __future__ import annotations

import argparse
import json
import logging
from itertools import chain
from pathlib import Path
from typing import Any, Final

from accelerate._impl.environment.variables import (
    count_devices,
    get_int_from_env,
    str_to_bool,
)
from accelerate._impl.settings.config_file import (
    default_config_file,
    load_config_from_file,
)

# Any in this file: argparse's own options, and values of flags.
_KINDS: Final = ("cpu", "multi_gpu", "tpu", "use_deepspeed", "use_fsdp")
_SWITCHES: Final = {"XLA": "tpu"} | {
    one.upper(): f"use_{one}" for one in ("deepspeed", "fsdp", "megatron_lm")
}
_TPU: Final = ("tpu_vm", "tpu_env", "tpu_name", "tpu_zone", "commands", "command_file")
_TEXTS: Final = json.loads(
    Path(__file__).with_name("launch_variables.json").read_text()
)
_SAYS: Final = _TEXTS["messages"]
REFUSED: Final[dict[str, str]] = _TEXTS["refused"]
_GROUPS: Final[dict[str, dict[str, dict[str, Any]]]] = json.loads(
    Path(__file__).with_suffix(".json").read_text()
)
_TYPES: Final[dict[str, Any]] = {
    "int": int,
    "float": float,
    "yes_or_no": str_to_bool,
    "yes_or_no_each": lambda words: tuple(
        str_to_bool(one.strip()) for one in words.split(",")
    ),
}


def _flag_default(flag_options: dict[str, Any]) -> Any:
    default_value = flag_options.get("default")
    return tuple(default_value) if isinstance(default_value, list) else default_value


def add_flags(parser: argparse.ArgumentParser) -> None:
    for title, flags in _GROUPS.items():
        group: Any = parser if title == "options" else parser.add_argument_group(title)
        for flag_name, flag_options in flags.items():
            names = dict.fromkeys(
                (f"--{flag_name}", flag_options.get("short", f"--{flag_name}"))
            )
            argument_options = {}
            for option_name, option_value in flag_options.items():
                if option_name in ("action", "choices"):
                    argument_options[option_name] = option_value
            if flag_type := _TYPES.get(flag_options.get("type", "")):
                argument_options["type"] = flag_type
            group.add_argument(
                *names,
                dest=flag_options.get("dest", flag_name),
                default=_flag_default(flag_options),
                **argument_options,
            )


def words_of(args: argparse.Namespace) -> list[str]:
    """Return the command line for hasten that a parsed namespace stands for."""
    words: list[str] = []
    for flag_name, flag_options in chain.from_iterable(
        flags.items() for flags in _GROUPS.values()
    ):
        flag_value = getattr(args, flag_options.get("dest", flag_name), None)
        is_given = flag_name in getattr(
            args, "nondefault", ()
        ) or flag_value != _flag_default(flag_options)
        if (
            is_given
            and flag_value is not None
            and flag_value is not False
            and (flag_name, flag_value) != ("num_processes", 0)
        ):
            if isinstance(flag_value, tuple):
                spelled_values = [",".join(map(str, flag_value))]
            elif isinstance(flag_value, list):
                spelled_values = flag_value
            elif flag_options.get("action") == "store_false":
                spelled_values = []
            else:
                spelled_values = ["true" if flag_value is True else flag_value]
            for spelled_value in spelled_values:
                words.append(f"--{flag_name}={spelled_value}")
    return [*words, args.training_script, *args.training_script_args]


def _validate_launch_command(
    args: argparse.Namespace,
) -> tuple[argparse.Namespace, Any, bool]:
    """Complete the arguments in place; return them, the settings file, and whether the precision came from it.

    Raises: ValueError for flags that exclude each other, and for unknown keys of the file.
    """
    if sum(bool(getattr(args, kind_name, False)) for kind_name in _KINDS) > 1:
        raise ValueError(_SAYS["too_many"])
    if getattr(args, "use_parallelism_config", False) and not args.use_fsdp:
        raise ValueError(_SAYS["only_fsdp"])
    if args.multi_gpu and args.num_processes is not None and args.num_processes < 2:
        raise ValueError("You need to use at least 2 processes to use `--multi_gpu`.")
    has_config = args.config_file is not None or (
        Path(default_config_file).is_file() and not args.cpu
    )
    if has_config:
        saved = load_config_from_file(args.config_file)
    else:
        saved = None
    from_file = (
        args.mixed_precision is None
        and saved is not None
        and saved.mixed_precision is not None
    )
    if saved is not None:
        _take_file_values(args, vars(saved))
    args.use_cpu = args.cpu if saved is None else saved.use_cpu
    filled_defaults = _fill_defaults(args)
    if filled_defaults and saved is None:
        logging.getLogger("accelerate.commands.launch").warning(
            _SAYS["defaults_used"].format("\n".join(filled_defaults))
        )
    return args, saved, from_file


def _take_file_values(args: argparse.Namespace, values: dict[str, Any]) -> None:
    """Write what the file says where the command line says nothing. Raises: ValueError for one device of several."""
    _choose_kind(args, values)
    set_values = {}
    for flag_name, file_value in values.items():
        if (
            file_value is not None
            and flag_name != "use_cpu"
            and hasattr(args, flag_name)
        ):
            set_values[flag_name] = file_value
    file_values = set_values | {
        flag_name: values.get(flag_name)
        for flag_name in _TPU
        if getattr(args, flag_name, None) is None
    }
    for group, inner in values.items():
        if group in ("dynamo_config", "fp8_config", "fsdp_config"):
            prefix = f"{group.removesuffix('_config')}_"
        else:
            prefix = ""
        if isinstance(inner, dict):
            file_values |= {
                f"{prefix}{flag_name.removeprefix(prefix)}": file_value
                for flag_name, file_value in inner.items()
            }
    command_line_names = getattr(args, "nondefault", ())
    vars(args).update(
        {
            flag_name: file_value
            for flag_name, file_value in file_values.items()
            if flag_name not in command_line_names
        }
    )
    if args.num_processes == -1:
        raise ValueError(
            "You need to manually pass in `--num_processes` using this config yaml."
        )
    if args.gpu_ids is None:
        args.gpu_ids = "all"
    if (
        args.multi_gpu
        and args.num_machines == 1
        and args.gpu_ids != "all"
        and "," not in str(args.gpu_ids)
    ):
        raise ValueError(_SAYS["one_device"])


def _choose_kind(args: argparse.Namespace, values: dict[str, Any]) -> None:
    """Switch on the file's kind of processes, unless the command line chose one."""
    if any(
        getattr(args, switch_name, False)
        for switch_name in ("multi_gpu", "tpu_use_cluster", *_SWITCHES.values())
    ):
        return
    distributed_type = str(getattr(values["distributed_type"], "value", ""))
    if distributed_type.startswith("MULTI_") and distributed_type != "MULTI_CPU":
        several = "multi_gpu"
    else:
        several = ""
    if switch := _SWITCHES.get(distributed_type, several):
        setattr(args, switch, True)
    args.use_parallelism_config = bool(values.get("parallelism_config"))


def _fill_defaults(args: argparse.Namespace) -> list[str]:
    """Give what is missing the original's defaults, and return a line for each."""
    devices = count_devices()
    otherwise = {
        "num_processes": devices,
        "num_machines": 1,
        "mixed_precision": "no",
        "dynamo_backend": "no",
    }
    unset = {}
    for flag_name, default_value in otherwise.items():
        if getattr(args, flag_name, None) is None:
            unset[flag_name] = default_value
    lines = []
    for flag_name, default_value in unset.items():
        lines.append(f"\t`--{flag_name}` was set to a value of `{default_value!r}`")
    if "num_processes" in unset and devices > 1 and not args.multi_gpu:
        lines.insert(1, _SAYS["several_devices"])
        args.multi_gpu = True
    threads = args.num_cpu_threads_per_process or get_int_from_env(
        ["OMP_NUM_THREADS"], 1
    )
    vars(args).update(
        unset, debug=bool(args.debug), num_cpu_threads_per_process=threads
    )
    return lines
