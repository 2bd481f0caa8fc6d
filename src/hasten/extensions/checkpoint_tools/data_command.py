"""`hasten data`: the samples of a batch of a saved run."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from hasten.cli.flags import CommandParser, whole

_EXAMPLE = """example:
  hasten data show run/checkpoints/checkpoint_3 --rank 1 --batch 17
  hasten data show run/checkpoints/checkpoint_3 --rank 1 --batch 17 --dataset train:make_dataset
"""


def main(argv: Sequence[str]) -> int:
    """Run `hasten data …`; return 0 if the batch was found."""
    given = _parser().parse_args(argv)
    found = _tool().look(
        given.checkpoint, given.rank, given.batch, given.epoch, given.loader
    )
    samples: list[Any] | None = None  # Any: the user's samples
    if given.dataset is not None:
        samples = _tool().fetch(given.dataset, found)
    if given.json:
        sys.stdout.write(json.dumps(_tool().as_json(found, samples)) + "\n")
    else:
        sys.stdout.write("\n".join(_tool().in_words(found, given.rank, samples)) + "\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="hasten data",
        description="Show the samples of a batch of a saved run.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(metavar="command", required=True)
    show = commands.add_parser(
        "show", help="show the dataset indices of a batch, and its samples"
    )
    show.add_argument(
        "checkpoint",
        help="a checkpoint of the run, or a folder of them (the newest is read)",
    )
    show.add_argument(
        "--rank",
        type=whole(),
        default=0,
        help="the rank that read the batch (default: 0)",
    )
    show.add_argument(
        "--batch",
        type=whole(),
        required=True,
        help="the number of the batch in the epoch, from 1",
    )
    show.add_argument(
        "--epoch", type=whole(), help="the epoch (default: that of the checkpoint)"
    )
    show.add_argument(
        "--loader",
        type=whole(),
        default=0,
        help="which prepared loader, from 0 (default: 0)",
    )
    show.add_argument(
        "--dataset",
        metavar="MODULE:FUNCTION",
        help="a function that returns the dataset; shows the samples",
    )
    show.add_argument("--json", action="store_true", help="print JSON")
    return parser


# Any: a module; imported late because torch is slow to import and --help does not need it
def _tool() -> Any:
    return import_module("hasten.extensions.checkpoint_tools.saved_batches")
