"""`accelerate test`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from hasten.cli import main as hasten_cli

# Any in this file: argparse's subparsers and namespaces.


def test_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """The parser of `accelerate test`."""
    if subparsers is not None:
        parser: argparse.ArgumentParser = subparsers.add_parser("test")
    else:
        parser = argparse.ArgumentParser("Accelerate test command")
    parser.add_argument("--config_file", default=None)
    if subparsers is not None:
        parser.set_defaults(func=test_command)
    return parser


def test_command(args: Any) -> int:
    """Run `accelerate test`."""
    file = ["--config_file", args.config_file] if args.config_file else []
    code: int = hasten_cli.main(["test", *file])
    return code


def run(words: Sequence[str]) -> int:
    """Run `accelerate test WORDS`."""
    return test_command(test_command_parser().parse_args(words))


def main() -> NoReturn:
    """Run the command."""
    sys.exit(run(sys.argv[1:]))
