"""`hasten estimate-memory`: memory that a model needs for inference and training, before it is loaded."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from hasten.cli.flags import CommandParser
from hasten.extensions.bigmodel.placement_plan import format_bytes

if TYPE_CHECKING:
    pass

_EPILOG = """target:
  a folder or file with weights     sizes come from the headers of its files
  module:function                   a function that returns the model
  a name on the Hub                 needs transformers, and a network
"""


def main(argv: Sequence[str]) -> int:
    """Run `hasten estimate-memory …`; return 0 if the model was found."""
    command_args = _make_parser().parse_args(argv)
    # this imports torch, which --help does not need
    from hasten.extensions.bigmodel.estimate import estimate_memory, shape_of

    shape = shape_of(command_args.target, command_args.trust_remote_code)
    rows = [
        estimate_memory(shape, dtype, command_args.optimizer)
        for dtype in command_args.dtypes
    ]
    if command_args.json:
        content = {
            "model": shape.name,
            "parameters": shape.num_parameters,
            "estimates": list(map(asdict, rows)),
        }
        sys.stdout.write(json.dumps(content, indent=2) + "\n")
        return 0
    table = Table(title=f"{shape.name}: {shape.num_parameters:,} parameters")
    for title in ("dtype", "largest layer", "weights to run", "to train"):
        table.add_column(title, justify="right")
    for row in rows:
        sizes = (row.largest, row.weights, row.training)
        table.add_row(row.dtype, *map(format_bytes, sizes))
    Console().print(table)
    return 0


def _make_parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="hasten estimate-memory",
        description="Estimate the memory a model needs.",
        epilog=_EPILOG,
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
    parser.add_argument("--trust_remote_code", action="store_true")
    parser.add_argument("--json", action="store_true")
    return parser
