"""hasten.Trainer and transformers' Trainer on the drop-in give the same losses with the same seed and order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import hasten
import hasten.trainer

transformers = pytest.importorskip("transformers")

ROWS = 24


def tiny_bert() -> Any:  # Any: transformers is imported on demand
    """A BERT of two small layers, without dropout: its random numbers are drawn differently by the two."""
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=32, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return transformers.BertForSequenceClassification(config)


def pairs() -> list[dict[str, Any]]:
    """Sequences of equal length per batch of four, so that both pad alike."""
    generator = torch.Generator().manual_seed(1)
    rows = []
    for index in range(ROWS):
        ids = torch.randint(1, 50, (5 + index // 4,), generator=generator)
        rows.append(
            {
                "input_ids": ids,
                "attention_mask": torch.ones_like(ids),
                "label": int(ids.sum()) % 2,
            }
        )
    return rows


class InOrder(hasten.Trainer):
    """Reads the data in its order."""

    def get_train_dataloader(self) -> Any:
        return self.get_eval_dataloader(self.train_dataset)


class TheirsInOrder(transformers.Trainer):  # type: ignore[misc, name-defined]
    """Reads the data in its order."""

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
        return torch.utils.data.SequentialSampler(self.train_dataset)


@pytest.mark.parametrize(("every", "schedule"), [(1, "linear"), (3, "cosine")])
def test_losses_are_those_of_the_other_trainer(
    tmp_path: Path, every: int, schedule: str
) -> None:
    common: dict[str, Any] = {
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        "num_train_epochs": 3,
        "learning_rate": 1e-3,
        "weight_decay": 0.01,
        "warmup_steps": 3,
        "lr_scheduler_type": schedule,
        "gradient_accumulation_steps": every,
        "logging_steps": 1,
        "save_strategy": "no",
        "seed": 7,
        "use_cpu": True,
        "disable_tqdm": True,
        "report_to": "none",
        "eval_strategy": "epoch",
    }
    trainer = InOrder(
        tiny_bert(),
        hasten.TrainingArguments(str(tmp_path), **common),
        train_dataset=pairs(),
        eval_dataset=pairs(),
    )
    trainer.train()
    reference = TheirsInOrder(
        tiny_bert(),
        transformers.TrainingArguments(str(tmp_path), **common),
        data_collator=hasten.trainer.default_data_collator,
        train_dataset=pairs(),
        eval_dataset=pairs(),
    )
    reference.train()
    for name in ("loss", "grad_norm", "learning_rate", "eval_loss"):
        logged_values = [log[name] for log in trainer.state.log_history if name in log]
        expected = [log[name] for log in reference.state.log_history if name in log]
        assert len(logged_values) == len(expected) > 2
        if name in ("loss", "grad_norm"):
            # transformers 5 trains on the sum over a window where a model takes the number of items and ignores it; AdamW does
            # not mind, and the losses of the evaluations agree
            expected = [value / every for value in expected]
        assert logged_values == pytest.approx(
            expected, abs=1e-4 if name == "grad_norm" else 1e-5
        ), name
