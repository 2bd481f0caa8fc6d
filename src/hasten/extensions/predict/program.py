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


def load_target(target: str, accelerator: Accelerator) -> Predict:
    """Return a function that maps a batch of rows to as many results. Ranks: every rank.

    Raises: ConfigError when there is no such module or name.
    """
    target_object = find_named(
        target, "give module:function with the module in the current folder"
    )
    if "accelerator" in inspect.signature(target_object).parameters:
        extra_arguments = {"accelerator": accelerator}
    else:
        extra_arguments = {}
    if inspect.isclass(target_object):
        instance: Any = target_object(**extra_arguments)
        return cast(Predict, instance)
    return lambda rows: target_object(rows, **extra_arguments)


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the command line written by `hasten predict`, and predict. Ranks: every rank."""
    parser = argparse.ArgumentParser(prog="hasten predict")
    parser.add_argument("target")
    parser.add_argument("data", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("batch_size", type=int)
    arguments = parser.parse_args(argv)
    accelerator = Accelerator()
    summary = predict_file(
        accelerator,
        arguments.target,
        arguments.data,
        arguments.output,
        arguments.batch_size,
    )
    accelerator.print(summary)
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
        predict = load_target(target, accelerator)
    row_parts = RowParts(output, len(rows), batch_size)
    changed_facts = ""
    with agree(accelerator.ctx.world, f"preparing {row_parts.folder}"):
        if accelerator.is_main_process:
            changed_facts = row_parts.begin_job(
                {
                    "target": target,
                    "model": module_digest(target),
                    "data": file_digest(data),
                    "batch_size": batch_size,
                }
            )
    missing_parts: list[int] = accelerator.broadcast_object_list(
        [row_parts.missing_parts()]
    )[0]
    num_finished = row_parts.count - len(missing_parts)
    with (
        agree(accelerator.ctx.world, f"predicting {len(rows)} rows of {data}"),
        torch.inference_mode(),
    ):
        rank_parts = missing_parts[
            accelerator.process_index :: accelerator.num_processes
        ]
        for part_number in accelerator.progress(rank_parts, desc="predict"):
            results = []
            for batch in row_parts.list_batches(part_number):
                results += predict_batch(predict, rows, batch)
            row_parts.finish_part(part_number, results)
    with agree(accelerator.ctx.world, f"writing {output}"):
        if accelerator.is_main_process:
            row_parts.publish_rows()
    if accelerator.num_processes == 1:
        process_words = "1 process"
    else:
        process_words = f"{accelerator.num_processes} processes"
    summary_words = [f"{output}: {len(rows)} rows on {process_words}"]
    if num_finished:
        summary_words.append(
            f"{num_finished} of {row_parts.count} parts already existed"
        )
    if changed_facts:
        summary_words.append(
            f"parts of another job were removed (different: {changed_facts})"
        )
    return "; ".join(summary_words)


def predict_batch(predict: Predict, rows: Rows, batch: range) -> list[Any]:
    """Return the results of a batch.

    Raises: DataError when their number differs from that of the rows; any error of the user's function, with a note of the rows.
    """
    try:
        returned_results = predict([rows[index] for index in batch])
        if not isinstance(returned_results, Iterable):
            raise DataError(
                f"{returned_results!r} was returned instead of results; return a list with one result per row."
            )
        results = list(returned_results)
    except Exception as error:  # any error of the user's code: re-raised with a note
        error.add_note(f"while predicting rows {batch.start} to {batch.stop - 1}")
        raise
    if len(results) != len(batch):
        raise DataError(
            f"{len(results)} results were returned for the {len(batch)} rows {batch.start} to {batch.stop - 1}, so they cannot be matched; "
            "return a list with one result per row."
        )
    return results


def file_digest(path: Path) -> str:
    """Return a checksum of a file."""
    return xxhash.xxh3_64_hexdigest(path.read_bytes())


def module_digest(target: str) -> str:
    """Return a checksum of the module that holds the target; empty without a file."""
    file = getattr(sys.modules.get(target.partition(":")[0]), "__file__", None)
    return file_digest(Path(file)) if file else ""


if __name__ == "__main__":
    main()
