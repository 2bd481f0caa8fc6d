"""Program of `hasten predict`: batches distributed over processes, results in order, written atomically.

Run under `hasten launch -m hasten.tools.predict.predict`.
"""

from __future__ import annotations

import argparse
import inspect
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, cast

import numpy as np
import torch
import xxhash

from hasten.accelerator.facade import Accelerator
from hasten.comm.agreement import agree
from hasten.errors import ConfigError, DataError
from hasten.optional import need
from hasten.state.saved_batches import find_named
from hasten.tools.predict.rows import RowParts, read_rows
from hasten.trainer.collate import DataCollatorWithPadding
from hasten.trainer.evaluation import EvalPrediction
from hasten.trainer.metrics import classification_metrics

# Any in this file: rows, results and models of transformers.
Rows = Sequence[dict[str, Any]]
Predict = Callable[[Rows], Sequence[Any]]

_TEXTS: Final = (
    *(("sentence1", "sentence2"), ("text", "text_pair"), ("premise", "hypothesis"), ("question", "sentence")),
    *(("text",), ("sentence",)),
)


def load(target: str, accelerator: Accelerator) -> Predict:
    """Return a function that maps a batch of rows to as many results. Ranks: every rank.

    Raises: ConfigError when there is no such folder, module or name, or the folder holds another kind of model.
    """
    if Path(target).is_dir():
        return SavedClassifier(Path(target), accelerator)
    made = find_named(
        target, "give a folder written by save_model, or module:function with the module in the current folder"
    )
    takes = {"accelerator": accelerator} if "accelerator" in inspect.signature(made).parameters else {}
    if inspect.isclass(made):
        instance: Any = made(**takes)
        return cast(Predict, instance)
    return lambda rows: made(rows, **takes)


class SavedClassifier:
    """A transformers model for sequence classification with its tokenizer, loaded from a folder."""

    def __init__(self, folder: Path, accelerator: Accelerator) -> None:
        transformers: Any = need("transformers", ">=4.45", why="predicting with a saved folder")
        if not (folder / "config.json").is_file():
            raise ConfigError(
                f"{folder} contains no config.json, so the model's class is unknown; write it with Trainer.save_model from a model of "
                "transformers, or give module:function that builds the model and loads the weights."
            )
        config = transformers.AutoConfig.from_pretrained(folder)
        names = list(config.architectures or ())
        if not names or not names[0].endswith("ForSequenceClassification"):
            raise ConfigError(
                f"{folder} holds {names[0] if names else 'a model without a class'}, but only sequence classification models are "
                "supported; give module:function instead."
            )
        model = getattr(transformers, names[0]).from_pretrained(folder)
        self._tokenizer = transformers.AutoTokenizer.from_pretrained(folder) if _has_tokenizer(folder) else None
        self._model = accelerator.prepare_model(model.to(accelerator.device), evaluation_mode=True).eval()
        self._device = accelerator.device
        self._labels: dict[int, str] = config.id2label
        self._pad = DataCollatorWithPadding(pad_token_id=config.pad_token_id or 0)

    def __call__(self, rows: Rows) -> list[dict[str, Any]]:
        inputs = self._inputs(rows)
        logits = self._model(**{name: value.to(self._device) for name, value in inputs.items()}).logits.float().cpu()
        scores = logits.softmax(-1)
        best = scores.argmax(-1).tolist()
        return [
            {"label": self._labels[index], "score": row[index].item(), "scores": row.tolist()}
            for index, row in zip(best, scores, strict=True)
        ]

    def _inputs(self, rows: Rows) -> dict[str, torch.Tensor]:
        if "input_ids" in rows[0]:
            known = ("input_ids", "attention_mask", "token_type_ids")
            return dict(self._pad([{name: row[name] for name in known if name in row} for row in rows]))
        columns = next((names for names in _TEXTS if all(name in rows[0] for name in names)), None)
        if columns is None or self._tokenizer is None:
            wanted = "; ".join(" and ".join(names) for names in _TEXTS)
            raise DataError(
                f"the rows have the columns {', '.join(rows[0])}, and the folder has {'a' if self._tokenizer else 'no'} tokenizer, so "
                f"the model has no input; provide input_ids, or a tokenizer in the folder and one of: {wanted}."
            )
        texts = ([row[name] for row in rows] for name in columns)
        return dict(self._tokenizer(*texts, truncation=True, padding=True, return_tensors="pt"))


def _has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json", "vocab.txt"))


# Any in this file: rows, results and facts are JSON values.


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the command line written by `hasten predict`, and predict. Ranks: every rank."""
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
    """Write the results of all rows of a file, and return a summary. Ranks: every rank.

    After a failure, a new run reuses the finished batches; the output is written atomically.
    Raises: on every rank when a row, the target or the disk fails on one.
    """
    with agree(accelerator.comm, f"reading {data} and loading {target}"):
        rows = read_rows(data)
        predict = load(target, accelerator)
    parts = RowParts(output, len(rows), batch_size)
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
    processes = "1 process" if accelerator.num_processes == 1 else f"{accelerator.num_processes} processes"
    words = [f"{output}: {len(rows)} rows on {processes}"]
    words += [f"{kept} of {parts.count} parts already existed"] if kept else []
    words += [f"parts of another job were removed (different: {differing})"] if differing else []
    scores = ""
    if evaluate:
        with agree(accelerator.comm, f"evaluating {output}"):
            scores = f"\n{json.dumps(metrics(output, rows))}" if accelerator.is_main_process else ""
    return "; ".join(words) + scores


def one_batch(predict: Predict, rows: Rows, batch: range) -> list[Any]:
    """Return the results of a batch.

    Raises: DataError when their number differs from that of the rows; any error of the user's function, with a note of the rows.
    """
    try:
        made = predict([rows[index] for index in batch])
        if not isinstance(made, Iterable):
            raise DataError(f"{made!r} was returned instead of results; return a list with one result per row.")
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


def metrics(output: Path, rows: Rows) -> Mapping[str, float]:
    """Return accuracy and F1 of the written scores against the rows' labels.

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
    """Return a checksum of a file."""
    return xxhash.xxh3_64_hexdigest(path.read_bytes())


def fingerprint(target: str) -> str:
    """Return a hash that changes with the target: of a folder's file sizes and times, or of the function's module."""
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
