"""`accelerate tpu-config`: follows later."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from accelerate import notyet


def tpu_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:  # Any: argparse's subparsers
    """The parser of `accelerate tpu-config`."""
    parser: argparse.ArgumentParser = (
        subparsers.add_parser("tpu-config")
        if subparsers is not None
        else argparse.ArgumentParser("Accelerate tpu-config command")
    )
    parser.add_argument("rest", nargs=argparse.REMAINDER)
    return parser


tpu_command = notyet.function("commands.tpu.tpu_command", "`accelerate tpu-config`")


def run(words: Sequence[str]) -> int:
    """Say that the command follows later."""
    sys.stderr.write("accelerate tpu-config is not in this version of hasten's stand-in yet; nothing was done.\n")
    return 2


def main() -> NoReturn:
    """Run the command."""
    sys.exit(run(sys.argv[1:]))
