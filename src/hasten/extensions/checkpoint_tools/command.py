"""`hasten ckpt`: list, verify, show, compare, merge and convert checkpoints."""

from __future__ import annotations

import argparse
import datetime as dt
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

_COMMANDS_HELP = """commands:
  list     list the checkpoints of a folder or URL, oldest first
  verify   read everything and check sizes, checksums and structure
  show     show step, world size, versions, settings, components and tensors
  diff     compare the tensors of two checkpoints (or exported models)
  merge    export the whole model of a sharded checkpoint, in the Hub layout
  convert  convert a folder of Hugging Face Accelerate or plain torch files into a checkpoint
"""


def main(argv: Sequence[str]) -> int:
    """Run `hasten ckpt …`; return 0 on success, 1 if something is damaged or differs."""
    arguments = _make_parser().parse_args(argv)
    code: int = arguments.run(arguments)
    return code


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hasten ckpt",
        description="List, verify, compare and convert checkpoints.",
        epilog=_COMMANDS_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(metavar="command", required=True)

    def add_command(
        command_name: str,
        run: Callable[[argparse.Namespace], int],
        **argument_helps: str,
    ) -> argparse.ArgumentParser:
        command_parser = commands.add_parser(command_name)
        for argument_name, argument_help in argument_helps.items():
            command_parser.add_argument(argument_name, help=argument_help)
        command_parser.set_defaults(run=run)
        return command_parser

    add_command(
        "list", _run_list, folder="a folder or URL of checkpoints"
    ).add_argument("--json", action="store_true")
    verify = add_command(
        "verify", _run_verify, folder="a checkpoint, or a folder of them"
    )
    verify.add_argument(
        "--all",
        action="store_true",
        help="verify every checkpoint in the folder, not only the newest",
    )
    show = add_command(
        "show",
        _run_show,
        folder="a checkpoint, or a folder of them (the newest is shown)",
    )
    show.add_argument("--json", action="store_true")
    show.add_argument(
        "--tensors",
        action="store_true",
        help="also list every tensor with its type and shape",
    )
    diff = add_command(
        "diff", _run_diff, first="a checkpoint or exported model", second="another one"
    )
    diff.add_argument(
        "--component", default="model", help="model, optimizer, ... (default: model)"
    )
    merge = add_command(
        "merge", _run_merge, folder="a checkpoint", output="the folder for the model"
    )
    merge.add_argument(
        "--component", default="model", help="which model (default: model)"
    )
    merge.add_argument("--max_shard_size", "--max-shard-size", default="10GB")
    merge.add_argument(
        "--unsafe_serialization",
        "--unsafe-serialization",
        action="store_true",
        help="write .bin files",
    )
    convert = add_command(
        "convert",
        _run_convert,
        source="a folder that another tool saved",
        output="the new checkpoint",
    )
    convert.add_argument(
        "--allow_pickle",
        "--allow-pickle",
        action="store_true",
        help="allow pickle; use only for files you trust",
    )
    return parser


def _load_inspect() -> Any:  # Any: a module
    # loads torch, which --help does not need
    return import_module("hasten.extensions.checkpoint_tools.inspect")


def _run_list(arguments: argparse.Namespace) -> int:
    inspect = _load_inspect()
    rows = []
    for checkpoint_place in inspect.find_all(arguments.folder):
        rows.append(inspect.make_row(*checkpoint_place))
    if arguments.json:
        shown_fields = (
            "name",
            "complete",
            "step",
            "world_size",
            "num_bytes",
            "created_s",
            "metrics",
            "problem",
        )
        shown_rows = []
        for row in rows:
            shown_rows.append({field: getattr(row, field) for field in shown_fields})
        _write_line(json.dumps(shown_rows, indent=2))
        return 0
    if not rows:
        _write_line(f"no checkpoints in {arguments.folder}")
        return 1
    _write_line(
        f"{'name':<24} {'step':>9} {'ranks':>5} {'size':>10}  {'saved':<17} state"
    )
    for row in rows:
        if row.created_s:
            saved_time = dt.datetime.fromtimestamp(row.created_s).strftime(
                "%Y-%m-%d %H:%M"
            )
        else:
            saved_time = "-"
        state_text = "complete" if row.complete else f"INCOMPLETE: {row.problem}"
        metric_words = []
        for metric_name, metric_value in (row.metrics or {}).items():
            if metric_value is not None:
                metric_words.append(f"{metric_name}={metric_value:g}")
        metrics_text = " ".join(metric_words)
        step = "-" if row.step is None else row.step
        ranks = "-" if row.world_size is None else row.world_size
        _write_line(
            f"{row.name:<24} {step:>9} {ranks:>5} {_format_size(row.num_bytes):>10}  {saved_time:<17} {state_text} {metrics_text}".rstrip()
        )
    return 0


def _run_verify(arguments: argparse.Namespace) -> int:
    inspect = _load_inspect()
    checkpoints = inspect.find_all(arguments.folder) if arguments.all else []
    if not checkpoints:
        checkpoints = [inspect.find_checkpoint(arguments.folder)]
    num_damaged = 0
    for store, checkpoint_name in checkpoints:
        with _progress_bar(
            f"verifying {checkpoint_name}",
            inspect.make_row(store, checkpoint_name).num_bytes,
        ) as advance:
            problems = inspect.verify_checkpoint(store, checkpoint_name, advance)
        verdict = "DAMAGED" if problems else "sound"
        _write_line(f"{checkpoint_name}: {verdict}")
        for problem in problems:
            _write_line(f"  {problem}")
        num_damaged += bool(problems)
    return 1 if num_damaged else 0


def _run_show(arguments: argparse.Namespace) -> int:
    inspect = _load_inspect()
    description = inspect.describe_checkpoint(
        *inspect.find_checkpoint(arguments.folder)
    )
    if not arguments.tensors:
        for component in description["components"].values():
            component.pop("tensors")
    if arguments.json:
        _write_line(json.dumps(description, indent=2))
        return 0
    _write_line(
        f"{description['where']}/{description['name']}: step {description['step']}, {_format_size(description['num_bytes'])} in {description['num_files']} files"
    )
    if description["world_size"] == 1:
        processes_text = "1 process"
    else:
        processes_text = f"{description['world_size']} processes"
    _write_line(
        f"saved by {processes_text}, mesh {description['mesh']}, versions {description['versions']}"
    )
    for key in ("metrics", "notes"):
        if description[key]:
            _write_line(f"{key}: {json.dumps(description[key])}")
    for component_name, component in description["components"].items():
        per_rank_words = ", one per rank" if component["per_rank"] else ""
        component_kind = component["kind"]
        if component_kind == "loader":
            component_kind = f"prepared loader {component_name.partition('_')[2] or 0}"
        _write_line(
            f"  {component_name} ({component_kind}{per_rank_words}): {component['num_tensors']} tensors in {len(component['files'])} files"
        )
        for key, tensor_text in component.get("tensors", {}).items():
            _write_line(f"    {key}: {tensor_text}")
    return 0


def _run_diff(arguments: argparse.Namespace) -> int:
    differences = _load_inspect().compare_checkpoints(
        arguments.first, arguments.second, arguments.component
    )
    for difference in differences:
        if difference.largest is None:
            largest_text = ""
        else:
            largest_text = f", by {difference.largest:.6g} at most"
        _write_line(f"{difference.name}: {difference.what}{largest_text}")
    _write_line(f"{len(differences)} differences" if differences else "equal")
    return 1 if differences else 0


def _run_merge(arguments: argparse.Namespace) -> int:
    with _progress_bar(f"merging {arguments.folder}", None):
        file_names = _load_inspect().merge_shards(
            arguments.folder,
            arguments.output,
            arguments.component,
            arguments.max_shard_size,
            not arguments.unsafe_serialization,
        )
    _write_line(f"wrote {', '.join(file_names)} to {arguments.output}")
    return 0


def _run_convert(arguments: argparse.Namespace) -> int:
    with _progress_bar(f"converting {arguments.source}", None):
        notes = _load_inspect().convert_folder(
            arguments.source, arguments.output, arguments.allow_pickle
        )
    for note in notes:
        _write_line(f"note: {note}")
    _write_line(f"wrote {arguments.output}")
    return 0


@contextmanager
def _progress_bar(
    bar_text: str, total_bytes: int | None
) -> Iterator[Callable[[int], None]]:
    """A progress bar on stderr if it is a terminal; yields a function that advances it."""
    progress_columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(
        *progress_columns, transient=True, disable=not sys.stderr.isatty()
    ) as progress:
        progress_task = progress.add_task(bar_text, total=total_bytes)
        yield lambda amount: progress.advance(progress_task, amount)


def _format_size(num_bytes: int) -> str:
    scaled_size = float(num_bytes)
    unit = "B"
    for larger_unit in ("kB", "MB", "GB", "TB"):
        if scaled_size < 1000:
            break
        scaled_size = scaled_size / 1000
        unit = larger_unit
    if unit != "B":
        return f"{scaled_size:.1f} {unit}"
    return f"{num_bytes} B"


def _write_line(line: str) -> None:
    """Print a line; control characters in names from the checkpoint are escaped."""
    escaped_line = "".join(
        char if char.isprintable() or char == "\n" else f"\\x{ord(char):02x}"
        for char in line
    )
    sys.stdout.write(escaped_line + "\n")
