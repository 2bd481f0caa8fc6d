"""`accelerate to-fsdp2`: a settings file with FSDP2's names."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import yaml

from accelerate._impl.environment.parsers import parser_of, runner
from accelerate._impl.surface.messages import message
from hasten.config.files import read_contents
from hasten.config.legacy import fsdp_from_fsdp1
from hasten.errors import ConfigError

# Any in this file: argparse's subparsers and namespaces, and values of settings.
_GONE = dict.fromkeys(
    ("fsdp_backward_prefetch", "fsdp_sync_module_states", "fsdp_use_orig_params"),
    "has been removed in FSDP2",
) | {"fsdp_forward_prefetch": "is not yet implemented in FSDP2"}
_LOG = logging.getLogger("accelerate.commands.to_fsdp2")


def to_fsdp2_command(args: Any) -> None:
    _validate_to_fsdp2_args(args)
    target = Path(args.config_file if args.output_file is None else args.output_file)
    target.write_text(
        yaml.safe_dump(convert_config_to_fsdp2(load_config(args.config_file)))
    )


def load_config(config_file: str) -> dict[str, Any]:
    return dict(yaml.safe_load(read_contents(Path(config_file))))


def convert_config_to_fsdp2(config: dict[str, Any]) -> dict[str, Any]:
    """Give the settings FSDP2's names, in place, and return them; those that have no meaning any more are logged.

    Raises: ConfigError for a strategy without an equivalent.
    """
    fsdp_config = config.get("fsdp_config") or {}
    if fsdp_config.get("fsdp_version") == 2:
        _LOG.warning(message("already_fsdp2"))
        _LOG.warning(message("change_fsdp_version"))
    elif fsdp_config:
        config["fsdp_config"] = {**_rename_settings(fsdp_config), "fsdp_version": 2}
    return config


def _rename_settings(fsdp1_config: dict[str, Any]) -> dict[str, Any]:
    fsdp: dict[str, Any] = {}
    for setting_name, setting_value in fsdp1_config.items():
        if setting_name in _GONE:
            _LOG.warning(
                f"Argument {setting_name} {_GONE[setting_name]}, skipping this key..."
            )
        elif setting_name == "fsdp_sharding_strategy":
            fsdp["fsdp_reshard_after_forward"] = _reshard_after_forward(setting_value)
        elif (setting_name, setting_value) == (
            "fsdp_state_dict_type",
            "LOCAL_STATE_DICT",
        ):
            fsdp[setting_name] = "SHARDED_STATE_DICT"
            _LOG.warning(
                f"{setting_name} {setting_value} is SHARDED_STATE_DICT in FSDP2"
            )
        else:
            fsdp[setting_name] = setting_value
    return fsdp


def _reshard_after_forward(value: Any) -> Any:
    """Return FSDP2's equivalent of a sharding strategy, by name or number."""
    if str(value).upper() in ("3", "NO_SHARD"):
        raise ConfigError(
            f"fsdp_sharding_strategy {value} has no equivalent in FSDP2; use DDP (MULTI_GPU) for it."
        )
    translated, _ = fsdp_from_fsdp1({"sharding_strategy": value})
    if translated.hybrid_shard:
        _LOG.warning(
            f"replicas of {value} are left out: set dp_replicate_size and dp_shard_size in parallelism_config"
        )
    return translated.reshard_after_forward


def _validate_to_fsdp2_args(args: Any) -> None:
    """Check that there is a file to read, and one that may be written. Raises: FileNotFoundError, ValueError, FileExistsError."""
    if args.config_file is None or not Path(args.config_file).exists():
        raise FileNotFoundError(f"Config file {args.config_file} not found")
    if not args.overwrite and args.output_file is None:
        raise ValueError("If --overwrite is not set, --output_file must be provided")
    if not args.overwrite and Path(args.output_file).exists():
        raise FileExistsError(
            f"Output file {args.output_file} already exists and --overwrite is not set"
        )


to_fsdp2_command_parser = parser_of("to-fsdp2", to_fsdp2_command)
run, main = runner("to-fsdp2", to_fsdp2_command_parser)
