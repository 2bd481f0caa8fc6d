"""`accelerate config`: questions, defaults, updates."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from accelerate._impl.commands.default import default_command_parser
from accelerate._impl.commands.update import update_command_parser
from accelerate._impl.environment.parsers import exit_code_of
from hasten.cli import main as hasten_cli

# Any in this file: argparse's subparsers and namespaces.


def config_command(args: Any) -> None:
    """Ask questions and write a settings file; the form is hasten's, which its launcher reads first."""
    file = ["--config_file", args.config_file] if args.config_file else []
    code = hasten_cli.main(["config", *file])
    if code:
        sys.exit(code)


def config_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """The parser of `accelerate config` without its subcommands."""
    if subparsers is not None:
        parser: argparse.ArgumentParser = subparsers.add_parser("config")
    else:
        parser = argparse.ArgumentParser("Accelerate config command")
    parser.add_argument("--config_file", default=None)
    if subparsers is not None:
        parser.set_defaults(func=config_command)
    return parser


def get_config_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """The parser of `accelerate config` and its subcommands."""
    parser = config_command_parser(subparsers)
    parser.set_defaults(func=config_command)
    more = parser.add_subparsers(title="subcommands", dest="subcommand")
    default_command_parser(more, [])
    update_command_parser(more, [])
    return parser


def run(words: Sequence[str]) -> int:
    """Run `accelerate config WORDS`."""
    args = get_config_parser().parse_args(words)
    return exit_code_of("config", lambda: args.func(args))


def main() -> NoReturn:
    """Run `accelerate-config`."""
    sys.exit(run(sys.argv[1:]))
