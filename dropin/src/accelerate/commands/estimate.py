"""`accelerate estimate-memory`: follows later."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from accelerate import notyet


def estimate_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:  # Any: argparse's subparsers
    """The parser of `accelerate estimate-memory`."""
    parser: argparse.ArgumentParser = (
        subparsers.add_parser("estimate-memory")
        if subparsers is not None
        else argparse.ArgumentParser("Accelerate estimate-memory command")
    )
    parser.add_argument("rest", nargs=argparse.REMAINDER)
    return parser


estimate_command = notyet.function("commands.estimate.estimate_command", "`accelerate estimate-memory`")


def run(words: Sequence[str]) -> int:
    """Say that the command follows later."""
    sys.stderr.write("accelerate estimate-memory is not in this version of hasten's stand-in yet; nothing was done.\n")
    return 2


def main() -> NoReturn:
    """Run the command."""
    sys.exit(run(sys.argv[1:]))
