"""`hasten plan`: search for the fastest settings for a model on given GPUs, before the job starts."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.table import Table

from hasten.cli.flags import CommandParser, split_at_dashes, whole
from hasten.config import files
from hasten.errors import ConfigError
from hasten.extensions.planning.plan import hardware, report
from hasten.extensions.planning.plan.search import (
    LayoutPlan,
    Option,
    PlanRequest,
    search,
)
from hasten.launch import links
from hasten.runtime.bytes_plan import format_bytes

_NUM_ROWS: Final = 10
_COLUMNS: Final = (
    "layout",
    "batch\nx steps",
    "memory\nof a rank",
    "step",
    "MFU",
    "why",
)
_ABOUT: Final = """target:
  script.py [its arguments]    a training script with an Accelerator; it runs up to its first batch, and its step is traced
  module:function              a function that returns the model, or the model and the inputs of one sample
  a folder                     with a config.json of transformers

No GPU and no weights are needed. Unknown arguments, and everything after `--`, are passed to the script.
"""


def main(argv: Sequence[str]) -> int:
    """Run `hasten plan …`; return 0 if a layout fits."""
    words, own = split_at_dashes(argv)
    given, unknown = _parser().parse_known_args(words)
    if unknown and not given.target.endswith(".py"):
        raise ConfigError(
            f"{unknown[0]!r} is not an option of `hasten plan`; `hasten plan --help` lists them."
        )
    known = hardware.read(given.hardware) if given.hardware else hardware.KNOWN
    accelerator = hardware.find_accelerator(given.gpu, known)
    if given.links:
        accelerator = hardware.linked(accelerator, links.read_links(given.links))
    request = PlanRequest(
        gpus=given.gpus,
        accelerator=accelerator,
        global_batch=given.global_batch,
        precisions=tuple(given.precision),
        micro_batch=given.micro_batch,
    )
    # import torch, which --help and invalid requests do not need
    from hasten.extensions.planning.plan import (
        targets,
        trace,
    )

    loop, name = targets.loop_of(given.target, [*unknown, *own], given.seq)
    sys.stderr.write(f"[hasten] tracing one training step of {name}\n")
    plan = search(trace.trace(loop, name, request.precisions), request)
    show(plan, Console())
    if given.output:
        files.write(report.config_of(plan, plan.best), given.output)
        sys.stdout.write(
            f"\nwritten: {given.output}; start it with `hasten launch --config_file {shlex.quote(given.output)} …`\n"
        )
    return 0


def show(plan: LayoutPlan, console: Console) -> None:
    """Print the ranked table, and the reasons for the best option."""
    request, trace = plan.request, plan.trace
    console.print(table(plan))
    console.print(
        f"{trace.num_parameters:,} parameters, {trace.optimizer.name}, "
        f"{f'{trace.sequence} tokens a sample, ' if trace.sequence > 1 else ''}"
        f"{format_bytes(request.accelerator.memory_bytes)} usable on each {request.accelerator.name}",
        highlight=False,
        soft_wrap=True,
    )
    for title, lines in (
        ("reasons for the first", report.why(plan)),
        ("to use it", report.notes(plan, plan.best)),
    ):
        console.print(f"[bold]{title}[/]")
        for line in lines:
            console.print(f"  {line}", highlight=False, soft_wrap=True)


def table(plan: LayoutPlan) -> Table:
    """Return a table of the first options, one per row."""
    shown = Table(
        title=f"{plan.trace.name} on {plan.request.gpus} x {plan.request.accelerator.name}"
    )
    for title in _COLUMNS:
        # these columns share the remaining width of a narrow terminal
        in_words = title in ("layout", "why")
        shown.add_column(
            title,
            justify="left" if in_words else "right",
            no_wrap=not in_words,
            ratio=1 if in_words else None,
            overflow="fold",
        )
    for option in plan.options[:_NUM_ROWS]:
        shown.add_row(*_cells(plan, option), style=None if option.fits else "dim")
    return shown


def _cells(plan: LayoutPlan, option: Option) -> list[str]:
    layout, memory = option.candidate, format_bytes(option.need.total)
    return [
        f"{layout.full_title}\n{layout.precision}",
        f"{layout.micro_batch} x {layout.micro_steps}",
        memory if option.fits else f"({memory})",
        report.seconds(option.time.total),
        f"{option.time.mfu(plan.request.accelerator, layout):.0%}",
        option.time.words() if option.fits else f"needs {memory}",
    ]


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="hasten plan",
        usage="hasten plan target --gpus N --gpu NAME --global-batch B [options] [arguments of a script]",
        allow_abbrev=False,
        description="Choose strategy, mesh, precision, recompute, offload and micro-batch for a model and GPUs.",
        epilog=_ABOUT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--gpus", type=whole(1, 1_000_000), required=True, help="number of GPUs"
    )
    parser.add_argument(
        "--gpu",
        required=True,
        help=f"model of the GPUs: {', '.join(hardware.KNOWN)}, or one of --hardware",
    )
    parser.add_argument(
        "--global-batch",
        "--global_batch",
        type=whole(1),
        required=True,
        help="samples per update, over all GPUs",
    )
    parser.add_argument(
        "--seq",
        type=whole(1),
        help="tokens per sample, for a folder or a model without inputs",
    )
    parser.add_argument(
        "--precision",
        nargs="+",
        default=["bf16"],
        choices=["no", "bf16", "fp16"],
        help="precisions to choose from",
    )
    parser.add_argument(
        "--micro-batch",
        "--micro_batch",
        type=whole(1),
        help="samples per forward pass, instead of a search",
    )
    parser.add_argument(
        "--hardware",
        type=Path,
        metavar="FILE",
        help="a YAML file that describes further GPUs",
    )
    parser.add_argument(
        "--links",
        type=Path,
        metavar="FILE",
        help="speeds of links measured by `hasten test --links FILE`, in place of the table's",
    )
    parser.add_argument(
        "-o",
        "--output",
        metavar="config.yaml",
        help="write the best settings to a file",
    )
    parser.add_argument("target", help="script.py, module:function or a folder")
    return parser
