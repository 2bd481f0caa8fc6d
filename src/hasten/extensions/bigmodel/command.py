"""`hasten estimate-memory`: memory that a model needs for inference and training, before it is loaded."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from hasten.cli.flags import CommandParser, whole
from hasten.extensions.bigmodel.placement_plan import readable

if TYPE_CHECKING:
    from hasten.extensions.bigmodel.estimate import ModelShape

_ABOUT = """target:
  a folder or file with weights     sizes come from the headers of its files
  module:function                   a function that returns the model, or the model and inputs of one sample
  a name on the Hub                 needs transformers, and a network
"""
_COLUMNS = (
    ("dtype", "dtype"),
    ("strategy", "strategy"),
    ("largest", "largest layer"),
    ("weights", "weights to run"),
    ("gradients", "gradients"),
    ("optimizer", "optimizer"),
    ("activations", "activations"),
    ("gathered", "gathered"),
    ("total", "to train"),
    ("largest_batch", "largest batch"),
)


def main(argv: Sequence[str]) -> int:
    """Run `hasten estimate-memory …`; return 0 if the model was found."""
    given = _parser().parse_args(argv)
    # these import torch, which --help does not need
    from hasten.checkpoint.export import parse_size
    from hasten.extensions.bigmodel.estimate import STRATEGIES, estimate, shape_of

    inputs = [tuple(int(size) for size in text.split("x")) for text in given.input]
    shape = shape_of(given.target, inputs, given.trust_remote_code)
    device = None if given.device_memory is None else parse_size(given.device_memory)
    processes = given.num_processes
    strategies = given.strategies or (STRATEGIES if processes > 1 else ("ddp",))
    rows = [
        asdict(
            estimate(
                shape, dtype, given.optimizer, given.batch, processes, device, strategy
            )
        )
        for dtype in given.dtypes
        for strategy in strategies
    ]
    if given.json:
        content = {
            "model": shape.name,
            "parameters": shape.num_parameters,
            "estimates": rows,
        }
        sys.stdout.write(json.dumps(content, indent=2) + "\n")
    else:
        _show(shape, rows)
    return 0


# Any: the values of an estimate
def _show(shape: ModelShape, rows: Sequence[dict[str, Any]]) -> None:
    table = Table(title=f"{shape.name}: {shape.num_parameters:,} parameters")
    alone = {row["strategy"] for row in rows} == {"ddp"}
    shown = [
        (key, title)
        for key, title in _COLUMNS
        if not (alone and key in ("strategy", "gathered"))
    ]
    columns = [
        (key, title)
        for key, title in shown
        if any(row[key] is not None for row in rows)
    ]
    for key, title in columns:
        table.add_column(title, justify="right", no_wrap=key in ("dtype", "strategy"))
    for row in rows:
        cells = [
            row[key]
            if key in ("dtype", "strategy", "largest_batch")
            else readable(row[key])
            for key, _ in columns
        ]
        table.add_row(*map(str, cells))
    Console().print(table)


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="hasten estimate-memory",
        description="Estimate the memory a model needs.",
        epilog=_ABOUT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "target", help="a folder of weights, module:function, or a name on the Hub"
    )
    parser.add_argument(
        "--dtypes", nargs="+", default=["float32", "bfloat16", "int8", "int4"]
    )
    parser.add_argument(
        "--optimizer", default="adam", help="adam, sgd, momentum or adafactor"
    )
    parser.add_argument(
        "--input",
        nargs="*",
        default=[],
        metavar="1x128",
        help="shapes of integer inputs to trace",
    )
    parser.add_argument("--batch", type=whole(1), default=1, help="samples per process")
    parser.add_argument(
        "--num_processes",
        type=whole(1),
        default=1,
        help="processes that share the memory",
    )
    parser.add_argument(
        "--strategies",
        nargs="+",
        metavar="NAME",
        help="ddp, zero1, zero2 or fsdp2 (all of them for several processes)",
    )
    parser.add_argument(
        "--device_memory", metavar="80GB", help="also print the largest batch that fits"
    )
    parser.add_argument("--trust_remote_code", action="store_true")
    parser.add_argument("--json", action="store_true")
    return parser
