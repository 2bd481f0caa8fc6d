"""`accelerate config`: questions, a file for this machine without questions, and files written again with today's keys."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any, Literal

from accelerate._impl.commands.answered import chosen_file
from accelerate._impl.environment.parsers import parser_of, runner
from accelerate._impl.environment.variables import (
    count_devices,
    get_current_device_type,
)
from accelerate._impl.settings.config_file import (
    ClusterConfig,
    default_config_file,
    load_config_from_file,
)
from hasten.cli.main import main as hasten

# Any in this file: argparse's subparsers and namespaces.
_EXISTS = "Configuration already exists at {}, will not override. Run `accelerate config` manually or pass a different `save_location`."


def config_command(args: Any) -> None:
    """Ask questions and write a settings file; the form is hasten's, which its launcher reads first."""
    if code := hasten(["config", *chosen_file(args)]):
        sys.exit(code)


config_command_parser = parser_of("config", config_command)


def get_config_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    parser = config_command_parser(subparsers)
    subcommand_parsers = parser.add_subparsers(title="subcommands", dest="subcommand")
    default_command_parser(subcommand_parsers, [])
    update_command_parser(subcommand_parsers, [])
    return parser


def write_basic_config(
    mixed_precision: str = "no", save_location: str = default_config_file
) -> Path | Literal[False]:
    """Write settings that suit this machine and return the file; False if there is one already, which is kept."""
    path = Path(save_location)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        print(_EXISTS.format(save_location))  # noqa: T201  this function has always told the user so
        return False
    if (word := mixed_precision.lower()) not in ("no", "fp16", "bf16", "fp8"):
        raise ValueError(
            f"`mixed_precision` should be one of 'no', 'fp16', 'bf16', or 'fp8'. Received {word}"
        )
    _suited_values(word).to_json_file(str(path))  # which is YAML, too
    return path


def _suited_values(mixed_precision: str) -> ClusterConfig:
    count = count_devices()
    if count < 2:
        several = "NO"
    else:
        several = get_current_device_type()[1]
    settings = {"use_cpu": count == 0, "debug": False, "num_processes": max(count, 1)}
    return ClusterConfig("LOCAL_MACHINE", several, mixed_precision, **settings)


def default_config_command(args: Any) -> None:
    file = write_basic_config(
        args.mixed_precision, args.save_location or default_config_file
    )
    if file:
        print(f"accelerate configuration saved at {file}")  # noqa: T201  the command answers on the terminal


def update_config(args: Any) -> str:
    file = args.config_file or default_config_file
    if not Path(file).exists():
        raise ValueError(f"The passed config file located at {file} doesn't exist.")
    config = load_config_from_file(file)
    (config.to_json_file if Path(file).suffix == ".json" else config.to_yaml_file)(
        str(file)
    )
    return str(file)


def update_config_command(args: Any) -> None:
    print(f"Successfully updated the configuration file at {update_config(args)}.")  # noqa: T201  the command answers


default_command_parser = parser_of("default", default_config_command)
update_command_parser = parser_of("update", update_config_command)
run, main = runner("config", get_config_parser)
