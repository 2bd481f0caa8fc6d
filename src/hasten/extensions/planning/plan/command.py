"""`hasten plan`: search for the fastest settings for a model on given GPUs, before the job starts."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.table import Table

from hasten.cli.flags import CommandParser, split_at_dashes, whole_number
from hasten.config import files
from hasten.errors import ConfigError
from hasten.extensions.planning.plan import hardware, report
from hasten.extensions.planning.plan.search import (
    LayoutPlan,
    Option,
    PlanRequest,
    search_layouts,
)
from hasten.launch import links
from hasten.runtime.bytes_plan import format_bytes

_NUM_ROWS: Final = 10
_COLUMN_TITLES: Final = (
    "layout",
    "batch\nx steps",
    "memory\nof a rank",
    "step",
    "MFU",
    "why",
)
_TARGET_HELP: Final = """target:
  script.py [its arguments]    a training script with an Accelerator; it runs up to its first batch, and its step is traced
  module:function              a function that returns the model, or the model and the inputs of one sample
  a folder                     with a config.json of transformers

No GPU and no weights are needed. Unknown arguments, and everything after `--`, are passed to the script.
"""


def main(argv: Sequence[str]) -> int:
    """Run `hasten plan …`; return 0 if a layout fits."""
    command_words, script_words = split_at_dashes(argv)
    arguments, unknown_words = _make_parser().parse_known_args(command_words)
    if unknown_words and not arguments.target.endswith(".py"):
        raise ConfigError(
            f"{unknown_words[0]!r} is not an option of `hasten plan`; `hasten plan --help` lists them."
        )
    hardware_table: Mapping[str, hardware.AcceleratorEntry] = hardware.KNOWN
    if arguments.hardware:
        hardware_table = hardware.read_entries(arguments.hardware)
    gpu_entry = hardware.find_accelerator(arguments.gpu, hardware_table)
    if arguments.links:
        gpu_entry = hardware.with_links(gpu_entry, links.read_links(arguments.links))
    plan_request = PlanRequest(
        gpus=arguments.gpus,
        accelerator=gpu_entry,
        global_batch=arguments.global_batch,
        precisions=tuple(arguments.precision),
        micro_batch=arguments.micro_batch,
    )
    # import torch, which --help and invalid requests do not need
    from hasten.extensions.planning.plan import (
        targets,
        trace,
    )

    training_loop, target_name = targets.find_loop(
        arguments.target, [*unknown_words, *script_words], arguments.seq
    )
    sys.stderr.write(f"[hasten] tracing one training step of {target_name}\n")
    layout_plan = search_layouts(
        trace.trace_step(training_loop, target_name, plan_request.precisions),
        plan_request,
    )
    print_plan(layout_plan, Console())
    if arguments.output:
        files.write(report.make_config(layout_plan, layout_plan.best), arguments.output)
        sys.stdout.write(
            f"\nwritten: {arguments.output}; start it with `hasten launch --config_file {shlex.quote(arguments.output)} …`\n"
        )
    return 0


def print_plan(layout_plan: LayoutPlan, console: Console) -> None:
    """Print the ranked table, and the reasons for the best option."""
    request = layout_plan.request
    model_trace = layout_plan.trace
    console.print(make_table(layout_plan))
    console.print(
        f"{model_trace.num_parameters:,} parameters, {model_trace.optimizer.name}, "
        f"{f'{model_trace.sequence} tokens a sample, ' if model_trace.sequence > 1 else ''}"
        f"{format_bytes(request.accelerator.memory_bytes)} usable on each {request.accelerator.name}",
        highlight=False,
        soft_wrap=True,
    )
    for title, lines in (
        ("reasons for the first", report.explain_best(layout_plan)),
        ("to use it", report.list_notes(layout_plan, layout_plan.best)),
    ):
        console.print(f"[bold]{title}[/]")
        for line in lines:
            console.print(f"  {line}", highlight=False, soft_wrap=True)


def make_table(layout_plan: LayoutPlan) -> Table:
    """Return a table of the first options, one per row."""
    plan_table = Table(
        title=f"{layout_plan.trace.name} on {layout_plan.request.gpus} x {layout_plan.request.accelerator.name}"
    )
    for title in _COLUMN_TITLES:
        # these columns share the remaining width of a narrow terminal
        in_words = title in ("layout", "why")
        plan_table.add_column(
            title,
            justify="left" if in_words else "right",
            no_wrap=not in_words,
            ratio=1 if in_words else None,
            overflow="fold",
        )
    for option in layout_plan.options[:_NUM_ROWS]:
        plan_table.add_row(
            *_format_cells(layout_plan, option), style=None if option.fits else "dim"
        )
    return plan_table


def _format_cells(layout_plan: LayoutPlan, option: Option) -> list[str]:
    layout = option.candidate
    shown_memory = format_bytes(option.need.total)
    remark = option.time.words()
    if not option.fits:
        remark = f"needs {shown_memory}"
        shown_memory = f"({shown_memory})"
    return [
        f"{layout.full_title}\n{layout.precision}",
        f"{layout.micro_batch} x {layout.micro_steps}",
        shown_memory,
        report.format_seconds(option.time.total),
        f"{option.time.mfu(layout_plan.request.accelerator, layout):.0%}",
        remark,
    ]


def _make_parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="hasten plan",
        usage="hasten plan target --gpus N --gpu NAME --global-batch B [options] [arguments of a script]",
        allow_abbrev=False,
        description="Choose strategy, mesh, precision, recompute, offload and micro-batch for a model and GPUs.",
        epilog=_TARGET_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--gpus", type=whole_number(1, 1_000_000), required=True, help="number of GPUs"
    )
    parser.add_argument(
        "--gpu",
        required=True,
        help=f"model of the GPUs: {', '.join(hardware.KNOWN)}, or one of --hardware",
    )
    parser.add_argument(
        "--global-batch",
        "--global_batch",
        type=whole_number(1),
        required=True,
        help="samples per update, over all GPUs",
    )
    parser.add_argument(
        "--seq",
        type=whole_number(1),
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
        type=whole_number(1),
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
