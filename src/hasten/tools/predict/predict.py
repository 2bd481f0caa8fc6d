"""The program of `hasten predict`: every batch on one of the processes, results in the order of the data, one rename at the end.

Run under `hasten launch -m hasten.tools.predict.predict`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash

from hasten.accelerator.facade import Accelerator
from hasten.comm.agreement import agree
from hasten.errors import DataError
from hasten.tools.predict.predict_model import Predict, Rows, load
from hasten.tools.predict.predict_parts import Parts
from hasten.tools.predict.predict_rows import read_rows
from hasten.trainer.evaluation import EvalPrediction
from hasten.trainer.metrics import classification_metrics

# Any in this file: rows, results and facts are JSON values.


def main(argv: Sequence[str] | None = None) -> None:
    """Read the command line that `hasten predict` wrote, and predict. Ranks: every rank."""
    parser = argparse.ArgumentParser(prog="hasten predict")
    parser.add_argument("target")
    parser.add_argument("data", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("batch_size", type=int)
    parser.add_argument("--evaluate", action="store_true")
    given = parser.parse_args(argv)
    accelerator = Accelerator()
    said = predict_file(accelerator, given.target, given.data, given.output, given.batch_size, given.evaluate)
    accelerator.print(said)
    accelerator.end_training()


def predict_file(
    accelerator: Accelerator, target: str, data: Path, output: Path, batch_size: int, evaluate: bool = False
) -> str:
    """Write the results of all rows of a file; what there is to say about it. Ranks: every rank.

    Started again after a failure, it keeps the batches that were finished; the output is there as a whole or not at all.
    Raises: on every rank when a row, the target or the disk fails on one.
    """
    with agree(accelerator.comm, f"reading {data} and loading {target}"):
        rows = read_rows(data)
        predict = load(target, accelerator)
    parts = Parts(output, len(rows), batch_size)
    differing = ""
    with agree(accelerator.comm, f"preparing {parts.folder}"):
        if accelerator.is_main_process:
            differing = parts.begin(
                {"target": target, "model": fingerprint(target), "data": digest(data), "batch_size": batch_size}
            )
    waiting: list[int] = accelerator.broadcast_object_list([parts.missing()])[0]
    kept = parts.count - len(waiting)
    with agree(accelerator.comm, f"predicting {len(rows)} rows of {data}"), torch.inference_mode():
        mine = waiting[accelerator.process_index :: accelerator.num_processes]
        for part in accelerator.progress(mine, desc="predict"):
            parts.finish(part, [result for batch in parts.batches(part) for result in one_batch(predict, rows, batch)])
    with agree(accelerator.comm, f"writing {output}"):
        if accelerator.is_main_process:
            parts.publish()
    words = [f"{output}: {len(rows)} rows on {accelerator.num_processes} processes"]
    words += [f"{kept} of {parts.count} parts were there already"] if kept else []
    words += [f"parts of another job were removed (different: {differing})"] if differing else []
    scores = ""
    if evaluate:
        with agree(accelerator.comm, f"evaluating {output}"):
            scores = f"\n{json.dumps(metrics(output, rows))}" if accelerator.is_main_process else ""
    return "; ".join(words) + scores


def one_batch(predict: Predict, rows: Rows, batch: range) -> list[Any]:
    """The results of a batch.

    Raises: DataError when there are not as many as rows; what the user's function raises, with the rows noted.
    """
    try:
        made = predict([rows[index] for index in batch])
        if not isinstance(made, Iterable):
            raise DataError(f"{made!r} came back instead of results; return a list with one result per row.")
        results = list(made)
    except Exception as error:  # any error of the user's code: noted and raised again
        error.add_note(f"while predicting rows {batch.start} to {batch.stop - 1}")
        raise
    if len(results) != len(batch):
        raise DataError(
            f"{len(results)} results came back for the {len(batch)} rows {batch.start} to {batch.stop - 1}, so they cannot be matched; "
            "return a list with one result per row."
        )
    return results


def metrics(output: Path, rows: Rows) -> Mapping[str, float]:
    """Accuracy and F1 of the written scores against the rows' labels.

    Raises: DataError when rows have no label or results no scores.
    """
    results = [json.loads(line) for line in output.read_text("utf-8").splitlines()]
    labels: list[Any] = [row.get("label", row.get("labels")) for row in rows]
    if not all("scores" in result for result in results) or any(label is None for label in labels) or not results:
        raise DataError(
            f"{output} cannot be evaluated: each row needs a label and each result needs scores; the output itself is complete."
        )
    found = EvalPrediction(
        np.array([result["scores"] for result in results]), np.array([int(label) for label in labels])
    )
    return {**classification_metrics(found), "num_rows": len(results)}


def digest(path: Path) -> str:
    """A checksum of a file."""
    return xxhash.xxh3_64_hexdigest(path.read_bytes())


def fingerprint(target: str) -> str:
    """What changes when the target does: the sizes and times of a folder's files, or the text of the function's module."""
    folder = Path(target)
    if folder.is_dir():
        facts = [
            (one.name, one.stat().st_size, one.stat().st_mtime_ns) for one in sorted(folder.iterdir()) if one.is_file()
        ]
        return xxhash.xxh3_64_hexdigest(repr(facts).encode())
    file = getattr(sys.modules.get(target.partition(":")[0]), "__file__", None)
    return digest(Path(file)) if file else ""


if __name__ == "__main__":
    main()
