"""`accelerate to-fsdp2`: a settings file with FSDP2's names."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import yaml

from accelerate._impl.environment.parsers import parser_of, runner
from accelerate._impl.surface.messages import message
from hasten.config.files import contents
from hasten.config.legacy import fsdp_from_fsdp1
from hasten.errors import ConfigError

# Any in this file: argparse's subparsers and namespaces, and values of settings.
_GONE = dict.fromkeys(
    ("fsdp_backward_prefetch", "fsdp_sync_module_states", "fsdp_use_orig_params"), "has been removed in FSDP2"
) | {"fsdp_forward_prefetch": "is not yet implemented in FSDP2"}
_LOG = logging.getLogger("accelerate.commands.to_fsdp2")


def convert(config: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Give the settings FSDP2's names, in place; return them, and a sentence for each that has no meaning any more.

    Raises: ConfigError for a strategy without an equivalent.
    """
    said: list[str] = []
    fsdp: dict[str, Any] = {}
    if config["fsdp_config"].get("fsdp_version") == 2:
        return config, [message("already_fsdp2"), message("change_fsdp_version")]
    for name, value in config["fsdp_config"].items():
        if name in _GONE:
            said.append(f"Argument {name} {_GONE[name]}, skipping this key...")
        elif name == "fsdp_sharding_strategy":
            fsdp["fsdp_reshard_after_forward"] = _reshard(value, said)
        elif (name, value) == ("fsdp_state_dict_type", "LOCAL_STATE_DICT"):
            fsdp[name] = "SHARDED_STATE_DICT"
            said.append(f"{name} {value} is SHARDED_STATE_DICT in FSDP2")
        else:
            fsdp[name] = value
    config["fsdp_config"] = {**fsdp, "fsdp_version": 2}
    return config, said


def _reshard(value: Any, said: list[str]) -> Any:
    """Return FSDP2's equivalent of a sharding strategy, by name or number."""
    if str(value).upper() in ("3", "NO_SHARD"):
        raise ConfigError(f"fsdp_sharding_strategy {value} has no equivalent in FSDP2; use DDP (MULTI_GPU) for it.")
    found, _ = fsdp_from_fsdp1({"sharding_strategy": value})
    if found.hybrid_shard:
        said.append(f"replicas of {value} are left out: set dp_replicate_size and dp_shard_size in parallelism_config")
    return found.reshard_after_forward


def to_fsdp2_command(args: Any) -> None:
    """Run `accelerate to-fsdp2`."""
    _validate_to_fsdp2_args(args)
    target = Path(args.config_file if args.output_file is None else args.output_file)
    target.write_text(yaml.safe_dump(convert_config_to_fsdp2(load_config(args.config_file))))


def load_config(config_file: str) -> dict[str, Any]:
    """Return the settings in a file."""
    return dict(yaml.safe_load(contents(Path(config_file))))


def convert_config_to_fsdp2(config: dict[str, Any]) -> dict[str, Any]:
    """Return the settings in FSDP2's names; those without a meaning are logged. Others than FSDP's stay as they are."""
    made, said = convert(config) if config.get("fsdp_config") else (config, [])
    for sentence in said:
        _LOG.warning(sentence)
    return made


def _validate_to_fsdp2_args(args: Any) -> None:
    """Check that there is a file to read, and one that may be written. Raises: FileNotFoundError, ValueError, FileExistsError."""
    if args.config_file is None or not Path(args.config_file).exists():
        raise FileNotFoundError(f"Config file {args.config_file} not found")
    if not args.overwrite and args.output_file is None:
        raise ValueError("If --overwrite is not set, --output_file must be provided")
    if not args.overwrite and Path(args.output_file).exists():
        raise FileExistsError(f"Output file {args.output_file} already exists and --overwrite is not set")


to_fsdp2_command_parser = parser_of("to-fsdp2", to_fsdp2_command)
run, main = runner("to-fsdp2", to_fsdp2_command_parser)
