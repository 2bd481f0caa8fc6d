"""A settings file written again with today's keys."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from accelerate._impl.settings.config_file import default_config_file, load_config_from_file

description = "Update an existing config file with the latest defaults while maintaining the old configuration."


def update_config(args: Any) -> str:  # Any: argparse's namespace
    """Write a settings file again; its place."""
    file = args.config_file or default_config_file
    if not Path(file).exists():
        raise ValueError(f"The passed config file located at {file} doesn't exist.")
    config = load_config_from_file(file)
    (config.to_json_file if str(file).endswith(".json") else config.to_yaml_file)(str(file))
    return str(file)


def update_command_parser(parser: Any, parents: Any) -> Any:  # Any: argparse's subparsers
    """The parser of `accelerate config update`."""
    parser = parser.add_parser("update", parents=parents, help=description)
    parser.add_argument("--config_file", default=None)
    parser.set_defaults(func=update_config_command)
    return parser


def update_config_command(args: Any) -> None:  # Any: argparse's namespace
    """Run `accelerate config update`."""
    print(f"Successfully updated the configuration file at {update_config(args)}.")  # noqa: T201  the command answers
