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

_ABOUT = """commands:
  list     list the checkpoints of a folder or URL, oldest first
  verify   read everything and check sizes, checksums and structure
  show     show step, world size, versions, settings, components and tensors
  diff     compare the tensors of two checkpoints (or exported models)
  merge    export the whole model of a sharded checkpoint, in the Hub layout
  convert  convert a folder of Hugging Face Accelerate or plain torch files into a checkpoint
"""


def main(argv: Sequence[str]) -> int:
    """Run `hasten ckpt …`; return 0 on success, 1 if something is damaged or differs."""
    given = _parser().parse_args(argv)
    code: int = given.run(given)
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hasten ckpt",
        description="List, verify, compare and convert checkpoints.",
        epilog=_ABOUT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(metavar="command", required=True)

    def add(
        name: str, run: Callable[[argparse.Namespace], int], **places: str
    ) -> argparse.ArgumentParser:
        one = commands.add_parser(name)
        for place, text in places.items():
            one.add_argument(place, help=text)
        one.set_defaults(run=run)
        return one

    add("list", _list, folder="a folder or URL of checkpoints").add_argument(
        "--json", action="store_true"
    )
    verify = add("verify", _verify, folder="a checkpoint, or a folder of them")
    verify.add_argument(
        "--all",
        action="store_true",
        help="verify every checkpoint in the folder, not only the newest",
    )
    show = add(
        "show", _show, folder="a checkpoint, or a folder of them (the newest is shown)"
    )
    show.add_argument("--json", action="store_true")
    show.add_argument(
        "--tensors",
        action="store_true",
        help="also list every tensor with its type and shape",
    )
    diff = add(
        "diff", _diff, first="a checkpoint or exported model", second="another one"
    )
    diff.add_argument(
        "--component", default="model", help="model, optimizer, ... (default: model)"
    )
    merge = add(
        "merge", _merge, folder="a checkpoint", output="the folder for the model"
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
    convert = add(
        "convert",
        _convert,
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


def _tools() -> Any:  # Any: a module
    # loads torch, which --help does not need
    return import_module("hasten.extensions.checkpoint_tools.inspect")


def _list(given: argparse.Namespace) -> int:
    inspect = _tools()
    rows = [inspect.row(*place) for place in inspect.everything(given.folder)]
    if given.json:
        keys = (
            "name",
            "complete",
            "step",
            "world_size",
            "num_bytes",
            "created_s",
            "metrics",
            "problem",
        )
        _write(
            json.dumps(
                [{key: getattr(row, key) for key in keys} for row in rows], indent=2
            )
        )
        return 0
    if not rows:
        _write(f"no checkpoints in {given.folder}")
        return 1
    _write(f"{'name':<24} {'step':>9} {'ranks':>5} {'size':>10}  {'saved':<17} state")
    for row in rows:
        saved = (
            dt.datetime.fromtimestamp(row.created_s).strftime("%Y-%m-%d %H:%M")
            if row.created_s
            else "-"
        )
        state = "complete" if row.complete else f"INCOMPLETE: {row.problem}"
        metrics = " ".join(
            f"{key}={value:g}"
            for key, value in (row.metrics or {}).items()
            if value is not None
        )
        step, ranks = (
            "-" if value is None else value for value in (row.step, row.world_size)
        )
        _write(
            f"{row.name:<24} {step:>9} {ranks:>5} {_size(row.num_bytes):>10}  {saved:<17} {state} {metrics}".rstrip()
        )
    return 0


def _verify(given: argparse.Namespace) -> int:
    inspect = _tools()
    wanted = (inspect.everything(given.folder) if given.all else []) or [
        inspect.find(given.folder)
    ]
    bad = 0
    for store, name in wanted:
        with _bar(f"verifying {name}", inspect.row(store, name).num_bytes) as advance:
            problems = inspect.verify(store, name, advance)
        _write(f"{name}: {'sound' if not problems else 'DAMAGED'}")
        for problem in problems:
            _write(f"  {problem}")
        bad += bool(problems)
    return 1 if bad else 0


def _show(given: argparse.Namespace) -> int:
    inspect = _tools()
    about = inspect.describe(*inspect.find(given.folder))
    if not given.tensors:
        for component in about["components"].values():
            component.pop("tensors")
    if given.json:
        _write(json.dumps(about, indent=2))
        return 0
    _write(
        f"{about['where']}/{about['name']}: step {about['step']}, {_size(about['num_bytes'])} in {about['num_files']} files"
    )
    processes = (
        "1 process" if about["world_size"] == 1 else f"{about['world_size']} processes"
    )
    _write(f"saved by {processes}, mesh {about['mesh']}, versions {about['versions']}")
    for key in ("metrics", "notes"):
        if about[key]:
            _write(f"{key}: {json.dumps(about[key])}")
    for name, component in about["components"].items():
        whose = ", one per rank" if component["per_rank"] else ""
        what = component["kind"]
        if what == "loader":
            what = f"prepared loader {name.partition('_')[2] or 0}"
        _write(
            f"  {name} ({what}{whose}): {component['num_tensors']} tensors in {len(component['files'])} files"
        )
        for key, text in component.get("tensors", {}).items():
            _write(f"    {key}: {text}")
    return 0


def _diff(given: argparse.Namespace) -> int:
    differences = _tools().diff(given.first, given.second, given.component)
    for item in differences:
        largest = "" if item.largest is None else f", by {item.largest:.6g} at most"
        _write(f"{item.name}: {item.what}{largest}")
    _write(f"{len(differences)} differences" if differences else "equal")
    return 1 if differences else 0


def _merge(given: argparse.Namespace) -> int:
    with _bar(f"merging {given.folder}", None):
        files = _tools().merge(
            given.folder,
            given.output,
            given.component,
            given.max_shard_size,
            not given.unsafe_serialization,
        )
    _write(f"wrote {', '.join(files)} to {given.output}")
    return 0


def _convert(given: argparse.Namespace) -> int:
    with _bar(f"converting {given.source}", None):
        notes = _tools().convert(given.source, given.output, given.allow_pickle)
    for note in notes:
        _write(f"note: {note}")
    _write(f"wrote {given.output}")
    return 0


@contextmanager
def _bar(text: str, total: int | None) -> Iterator[Callable[[int], None]]:
    """A progress bar on stderr if it is a terminal; yields a function that advances it."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(
        *columns, transient=True, disable=not sys.stderr.isatty()
    ) as progress:
        task = progress.add_task(text, total=total)
        yield lambda amount: progress.advance(task, amount)


def _size(num_bytes: int) -> str:
    size, unit = float(num_bytes), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if size < 1000:
            break
        size, unit = size / 1000, larger
    return f"{size:.1f} {unit}" if unit != "B" else f"{num_bytes} B"


def _write(line: str) -> None:
    """Print a line; control characters in names from the checkpoint are escaped."""
    shown = "".join(
        char if char.isprintable() or char == "\n" else f"\\x{ord(char):02x}"
        for char in line
    )
    sys.stdout.write(shown + "\n")
