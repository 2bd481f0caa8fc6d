"""Program of `hasten predict`: batches distributed over processes, results in order, written atomically.

Run under `hasten launch -m hasten.extensions.predict.program`.
"""

from __future__ import annotations

import argparse
import inspect
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, cast

import torch
import xxhash

from hasten.accelerator.facade import Accelerator
from hasten.cli.flags import find_named
from hasten.comm.agreement import agree
from hasten.errors import DataError
from hasten.extensions.predict.rows import RowParts, read_rows

# Any in this file: rows and results are JSON values.
Rows = Sequence[dict[str, Any]]
Predict = Callable[[Rows], Sequence[Any]]


def load(target: str, accelerator: Accelerator) -> Predict:
    """Return a function that maps a batch of rows to as many results. Ranks: every rank.

    Raises: ConfigError when there is no such module or name.
    """
    made = find_named(
        target, "give module:function with the module in the current folder"
    )
    takes = (
        {"accelerator": accelerator}
        if "accelerator" in inspect.signature(made).parameters
        else {}
    )
    if inspect.isclass(made):
        instance: Any = made(**takes)
        return cast(Predict, instance)
    return lambda rows: made(rows, **takes)


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the command line written by `hasten predict`, and predict. Ranks: every rank."""
    parser = argparse.ArgumentParser(prog="hasten predict")
    parser.add_argument("target")
    parser.add_argument("data", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("batch_size", type=int)
    given = parser.parse_args(argv)
    accelerator = Accelerator()
    said = predict_file(
        accelerator, given.target, given.data, given.output, given.batch_size
    )
    accelerator.print(said)
    accelerator.end_training()


def predict_file(
    accelerator: Accelerator, target: str, data: Path, output: Path, batch_size: int
) -> str:
    """Write the results of all rows of a file, and return a summary. Ranks: every rank.

    After a failure, a new run reuses the finished batches; the output is written atomically.
    Raises: on every rank when a row, the target or the disk fails on one.
    """
    with agree(accelerator.ctx.world, f"reading {data} and loading {target}"):
        rows = read_rows(data)
        predict = load(target, accelerator)
    parts = RowParts(output, len(rows), batch_size)
    differing = ""
    with agree(accelerator.ctx.world, f"preparing {parts.folder}"):
        if accelerator.is_main_process:
            differing = parts.begin(
                {
                    "target": target,
                    "model": fingerprint(target),
                    "data": digest(data),
                    "batch_size": batch_size,
                }
            )
    waiting: list[int] = accelerator.broadcast_object_list([parts.missing()])[0]
    kept = parts.count - len(waiting)
    with (
        agree(accelerator.ctx.world, f"predicting {len(rows)} rows of {data}"),
        torch.inference_mode(),
    ):
        mine = waiting[accelerator.process_index :: accelerator.num_processes]
        for part in accelerator.progress(mine, desc="predict"):
            parts.finish(
                part,
                [
                    result
                    for batch in parts.batches(part)
                    for result in one_batch(predict, rows, batch)
                ],
            )
    with agree(accelerator.ctx.world, f"writing {output}"):
        if accelerator.is_main_process:
            parts.publish()
    processes = (
        "1 process"
        if accelerator.num_processes == 1
        else f"{accelerator.num_processes} processes"
    )
    words = [f"{output}: {len(rows)} rows on {processes}"]
    words += [f"{kept} of {parts.count} parts already existed"] if kept else []
    words += (
        [f"parts of another job were removed (different: {differing})"]
        if differing
        else []
    )
    return "; ".join(words)


def one_batch(predict: Predict, rows: Rows, batch: range) -> list[Any]:
    """Return the results of a batch.

    Raises: DataError when their number differs from that of the rows; any error of the user's function, with a note of the rows.
    """
    try:
        made = predict([rows[index] for index in batch])
        if not isinstance(made, Iterable):
            raise DataError(
                f"{made!r} was returned instead of results; return a list with one result per row."
            )
        results = list(made)
    except Exception as error:  # any error of the user's code: re-raised with a note
        error.add_note(f"while predicting rows {batch.start} to {batch.stop - 1}")
        raise
    if len(results) != len(batch):
        raise DataError(
            f"{len(results)} results were returned for the {len(batch)} rows {batch.start} to {batch.stop - 1}, so they cannot be matched; "
            "return a list with one result per row."
        )
    return results


def digest(path: Path) -> str:
    """Return a checksum of a file."""
    return xxhash.xxh3_64_hexdigest(path.read_bytes())


def fingerprint(target: str) -> str:
    """Return a checksum of the module that holds the target; empty without a file."""
    file = getattr(sys.modules.get(target.partition(":")[0]), "__file__", None)
    return digest(Path(file)) if file else ""


if __name__ == "__main__":
    main()
