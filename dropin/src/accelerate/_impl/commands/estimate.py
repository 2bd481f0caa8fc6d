"""`accelerate estimate-memory`, answered by hasten."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from hasten.cli.main import main as hasten


def estimate_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:  # Any: argparse's subparsers
    """The parser of `accelerate estimate-memory`."""
    parser: argparse.ArgumentParser = (
        subparsers.add_parser("estimate-memory")
        if subparsers is not None
        else argparse.ArgumentParser("Accelerate estimate-memory command")
    )
    parser.add_argument("model_name", help="a name on the Hub, or a folder of weights")
    parser.add_argument("--library_name", choices=["timm", "transformers"], help="taken from the model")
    parser.add_argument(
        "--dtypes",
        nargs="+",
        default=["float32", "float16", "int8", "int4"],
        choices=["float32", "float16", "int8", "int4"],
    )
    parser.add_argument("--trust_remote_code", action="store_true")
    if subparsers is not None:
        parser.set_defaults(func=estimate_command)
    return parser


def estimate_command(args: argparse.Namespace) -> int:
    """Print the memory a model needs."""
    words = ["estimate-memory", args.model_name, "--dtypes", *args.dtypes]
    return hasten([*words, "--trust_remote_code"] if args.trust_remote_code else words)


def run(words: Sequence[str]) -> int:
    """Run the command with these words."""
    return estimate_command(estimate_command_parser().parse_args(list(words)))


def main() -> NoReturn:
    """Run the command."""
    sys.exit(run(sys.argv[1:]))
