"""A tiny regression to train in tests, and loaders of the samples that example scripts are tested with."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from accelerate._impl.enums import DistributedType
from hasten.optional import need

_SAMPLES = {
    "train": "tests/test_samples/MRPC/train.csv",
    "validation": "tests/test_samples/MRPC/dev.csv",
}
# Any in this file: rows, tokenizers and accelerators.


class RegressionDataset(Dataset[dict[str, float]]):
    def __init__(
        self, a: float = 2, b: float = 3, length: int = 64, seed: int | None = None
    ) -> None:
        rng = np.random.default_rng(seed)
        self.length = length
        self.x = rng.normal(size=(length,)).astype(np.float32)
        self.y = (
            a * self.x + b + rng.normal(scale=0.1, size=(length,)).astype(np.float32)
        )

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, i: int) -> dict[str, float]:
        return {"x": self.x[i], "y": self.y[i]}


class RegressionModel(nn.Module):
    def __init__(self, a: float = 0, b: float = 0, double_output: bool = False) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.tensor(a).float())
        self.b = nn.Parameter(torch.tensor(b).float())
        self.first_batch = True

    def forward(self, x: Tensor | None = None) -> Tensor:
        assert x is not None, "the model needs an input"
        if self.first_batch:
            print(  # noqa: T201  as the original
                f"Model dtype: {self.a.dtype}, {self.b.dtype}. Input dtype: {x.dtype}"
            )
            self.first_batch = False
        return x * self.a + self.b


def mocked_dataloaders(
    accelerator: Any, batch_size: int = 16
) -> tuple[DataLoader[Any], DataLoader[Any]]:
    """Return loaders of the samples in the current folder, in batches of 2 and 1 whatever was asked for."""
    tokenizer = need("transformers").AutoTokenizer.from_pretrained("bert-base-cased")
    data = need("datasets").load_dataset("csv", data_files=_SAMPLES)
    rows = partial(_tokenize_pairs, tokenizer, data["train"].unique("label"))
    ready = data.map(
        rows, batched=True, remove_columns=["sentence1", "sentence2", "label"]
    )
    fixed = accelerator.distributed_type == DistributedType.XLA
    if fixed:
        padded = {"padding": "max_length", "max_length": 128}
    else:
        padded = {"padding": "longest"}
    collate = partial(tokenizer.pad, **padded, return_tensors="pt")
    train = DataLoader(ready["train"], shuffle=True, collate_fn=collate, batch_size=2)
    return train, DataLoader(
        ready["validation"], shuffle=False, collate_fn=collate, batch_size=1
    )


def _tokenize_pairs(tokenizer: Any, labels: list[str], of: Any) -> Any:
    tokenized = tokenizer(
        of["sentence1"],
        of["sentence2"],
        truncation=True,
        max_length=None,
        padding="max_length",
    )
    return {**tokenized, "labels": list(map(labels.index, of["label"]))}
