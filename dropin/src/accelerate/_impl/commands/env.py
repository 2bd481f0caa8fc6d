"""`accelerate env`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from accelerate import __version__
from hasten.cli import main as hasten_cli

# Any in this file: argparse's subparsers and namespaces.


def env_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """The parser of `accelerate env`."""
    if subparsers is not None:
        parser: argparse.ArgumentParser = subparsers.add_parser("env")
    else:
        parser = argparse.ArgumentParser("Accelerate env command")
    parser.add_argument("--config_file", default=None)
    if subparsers is not None:
        parser.set_defaults(func=env_command)
    return parser


def env_command(args: Any) -> int:
    """Run `accelerate env`."""
    print(f"- `Accelerate` version: {__version__}")  # noqa: T201  the report starts with what stands in
    file = ["--config_file", args.config_file] if args.config_file else []
    code: int = hasten_cli.main(["env", *file])
    return code


def run(words: Sequence[str]) -> int:
    """Run `accelerate env WORDS`."""
    return env_command(env_command_parser().parse_args(words))


def main() -> NoReturn:
    """Run the command."""
    sys.exit(run(sys.argv[1:]))
