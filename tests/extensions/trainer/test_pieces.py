"""Schedules, collators, columns and losses of the Trainer."""

from __future__ import annotations

from typing import Any, Final

import pytest
import torch
from datasets import Dataset
from torch import nn

from hasten import TrainingArguments
from hasten.errors import ArgumentError, DataError, SettingValueError
from hasten.extensions.trainer.collate import (
    CollateUsed,
    taken_by,
    without_unused,
)
from hasten.extensions.trainer.loss import (
    loss_in,
    num_items,
    outputs_besides_loss,
)
from hasten.extensions.trainer.schedules import make_optimizer, num_warmup_steps
from hasten.trainer import DataCollatorWithPadding, default_data_collator, get_scheduler
from tests.support.toys import Scored, Tagged

transformers_schedules = pytest.importorskip("transformers.optimization")


REQUIRED: Final[dict[str, dict[str, Any]]] = {
    "cosine_with_min_lr": {"min_lr_rate": 0.1},
    "warmup_stable_decay": {"num_decay_steps": 4},
}
"""Options without a default, by schedule."""


def rates(scheduler: Any, optimizer: Any, steps: int) -> list[float]:
    learning_rates = []
    for _ in range(steps):
        learning_rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return learning_rates


@pytest.mark.parametrize(
    "name",
    [
        "linear",
        "cosine",
        "cosine_with_min_lr",
        "constant",
        "constant_with_warmup",
        "warmup_stable_decay",
    ],
)
@pytest.mark.parametrize(("warmup", "total"), [(0, 10), (3, 10), (10, 10), (4, 25)])
def test_schedules_are_the_established_ones(name: str, warmup: int, total: int) -> None:
    options = REQUIRED.get(name)
    rate_curves = []
    for get in (get_scheduler, transformers_schedules.get_scheduler):
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.5)
        rate_curves.append(
            rates(get(name, optimizer, warmup, total, options), optimizer, total)
        )
    assert rate_curves[0] == pytest.approx(rate_curves[1], abs=1e-9)


def test_schedule_options_are_checked() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    with pytest.raises(SettingValueError, match="one of linear"):
        get_scheduler("linaer", optimizer)
    for name, options, wrong in (
        ("cosine", {"power": 2}, "power"),
        ("cosine_with_min_lr", {}, "min_lr_rate"),
        ("warmup_stable_decay", {}, "num_decay_steps"),
        ("cosine_with_min_lr", {"min_lr": 1e-6}, "min_lr"),
    ):
        with pytest.raises(SettingValueError, match=f"{name}.*'{wrong}'"):
            get_scheduler(name, optimizer, 0, 10, options)
    with pytest.raises(
        SettingValueError,
        match=r"options are min_lr_rate, num_cycles; .* fractions of learning_rate",
    ):
        get_scheduler("cosine_with_min_lr", optimizer, 0, 10, {"min_lr": 1e-6})
    low = get_scheduler("cosine_with_min_lr", optimizer, 0, 10, {"min_lr_rate": 0.1})
    assert rates(low, optimizer, 11)[-1] == pytest.approx(0.1)


def test_warmup_is_a_number_or_a_part() -> None:
    assert [
        num_warmup_steps(TrainingArguments("out", **changes), 50)
        for changes in (
            {},
            {"warmup_steps": 7},
            {"warmup_steps": 0.1},
            {"warmup_ratio": 0.25},
        )
    ] == [0, 7, 5, 13]


def test_vectors_do_not_decay_and_names_choose_the_optimizer() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3))
    matrices, vectors = make_optimizer(
        TrainingArguments("out", weight_decay=0.1), model
    ).param_groups
    assert ([p.ndim for p in matrices["params"]], matrices["weight_decay"]) == (
        [2],
        0.1,
    )
    assert ([p.ndim for p in vectors["params"]], vectors["weight_decay"]) == (
        [1, 1, 1],
        0.0,
    )
    assert (
        type(make_optimizer(TrainingArguments("out", optim="sgd"), model))
        is torch.optim.SGD
    )
    with pytest.raises(SettingValueError, match="one of adamw_torch"):
        make_optimizer(TrainingArguments("out", optim="adamw_hf"), model)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("multiple", [None, 4])
def test_padding_keeps_every_token_and_marks_the_rest(
    side: Any, multiple: int | None
) -> None:
    data = Tagged(9)
    collate = DataCollatorWithPadding(
        pad_token_id=7, padding_side=side, pad_to_multiple_of=multiple
    )
    batch = collate([data[index] for index in range(9)])
    width = batch["input_ids"].shape[1]
    assert width % (multiple or 1) == 0
    for row in range(9):
        size = len(data[row]["input_ids"])
        real = slice(0, size) if side == "right" else slice(width - size, width)
        assert batch["input_ids"][row, real].tolist() == data[row]["input_ids"]
        assert batch["labels"][row, real].tolist() == data[row]["labels"]
        assert batch["attention_mask"][row].sum() == size
        assert (batch["input_ids"][row] == 7).sum() >= width - size
        assert (batch["labels"][row] == -100).sum() == width - size


def test_the_pad_token_comes_from_the_tokenizer_or_is_asked_for() -> None:
    class Tokenizer:
        pad_token_id = 3
        padding_side = "left"

    batch = DataCollatorWithPadding(Tokenizer())(
        [{"input_ids": [1]}, {"input_ids": [1, 2], "label": 1}][:1] * 2
    )
    assert batch["input_ids"].tolist() == [[1], [1]]
    with pytest.raises(ArgumentError, match="pad_token_id"):
        DataCollatorWithPadding()


def test_label_becomes_labels_and_ragged_samples_are_refused() -> None:
    assert default_data_collator([{"a": 1, "label": 2}])["labels"].tolist() == [2]
    assert default_data_collator([(1, 2), (3, 4)])[0].tolist() == [1, 3]
    with pytest.raises(DataError, match="DataCollatorWithPadding"):
        default_data_collator([{"a": [1]}, {"a": [1, 2]}])


def test_unused_columns_are_dropped() -> None:
    taken = taken_by(Scored(), ["target"])
    assert taken == frozenset({"x", "labels", "label", "label_ids", "target"})
    data = Dataset.from_dict({"x": [[1.0]], "label": [0], "text": ["a"], "idx": [1]})
    assert without_unused(data, taken).column_names == ["x", "label"]
    with pytest.raises(DataError, match="remove_unused_columns=False"):
        without_unused(Dataset.from_dict({"text": ["a"]}), taken)
    assert without_unused([1, 2], taken) == [1, 2]
    collate = CollateUsed(default_data_collator, frozenset({"x"}))
    assert set(collate([{"x": 1, "text": "a"}])) == {"x"}
    with pytest.raises(DataError, match="no key"):
        collate([{"text": "a"}])

    class Anything(nn.Module):
        def forward(self, *args: Any, **kwargs: Any) -> None: ...

    assert taken_by(Anything(), []) is None


def test_losses_are_found_and_counted() -> None:
    loss, logits = torch.tensor(2.0), torch.zeros(2, 3)
    for outputs in ({"loss": loss, "logits": logits}, (loss, logits)):
        assert loss_in(outputs) is loss
        assert outputs_besides_loss(outputs, True) is logits
    assert loss_in(loss) is loss
    with pytest.raises(ArgumentError, match="override compute_loss"):
        loss_in(logits)
    labels = torch.tensor([[-100, 1, 2], [3, -100, -100]])
    assert int(num_items(labels, False)) == 3  # type: ignore[arg-type]
    assert int(num_items(labels, True)) == 2  # type: ignore[arg-type]
    assert num_items(None, False) is None
    assert int(num_items(torch.zeros(4), False)) == 4  # type: ignore[arg-type]
