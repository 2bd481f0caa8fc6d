"""What `hasten predict` calls for each batch: a function or class of the user's, or a classifier saved in a folder."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, cast

import torch

from hasten.accelerator.facade import Accelerator
from hasten.errors import ConfigError, DataError
from hasten.optional import need
from hasten.state.named import find_named
from hasten.trainer.collate import DataCollatorWithPadding

# Any in this file: rows and results are the user's own; so are models of transformers.
Rows = Sequence[dict[str, Any]]
Predict = Callable[[Rows], Sequence[Any]]

_TEXTS: Final = (
    *(("sentence1", "sentence2"), ("text", "text_pair"), ("premise", "hypothesis"), ("question", "sentence")),
    *(("text",), ("sentence",)),
)


def load(target: str, accelerator: Accelerator) -> Predict:
    """What turns a batch of rows into as many results. Ranks: every rank.

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
    """A model of transformers for sequence classification with its tokenizer, from a folder."""

    def __init__(self, folder: Path, accelerator: Accelerator) -> None:
        transformers: Any = need("transformers", ">=4.45", why="predicting with a saved folder")
        if not (folder / "config.json").is_file():
            raise ConfigError(
                f"{folder} holds no config.json, so the model's class is not known; write it with Trainer.save_model from a model of "
                "transformers, or give module:function that builds the model and loads the weights."
            )
        config = transformers.AutoConfig.from_pretrained(folder)
        names = list(config.architectures or ())
        if not names or not names[0].endswith("ForSequenceClassification"):
            raise ConfigError(
                f"{folder} holds {names[0] if names else 'a model without a class'}, while a folder can only be predicted with when it holds "
                "a model for sequence classification; give module:function instead."
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
                f"the rows have the columns {', '.join(rows[0])}, and the folder has {'a' if self._tokenizer else 'no'} tokenizer, so there is "
                f"nothing to give to the model; bring input_ids, or a tokenizer in the folder and one of: {wanted}."
            )
        texts = ([row[name] for row in rows] for name in columns)
        return dict(self._tokenizer(*texts, truncation=True, padding=True, return_tensors="pt"))


def _has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json", "vocab.txt"))
