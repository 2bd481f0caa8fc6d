"""The Trainer's `ema_decay`: evaluation and export use the averaged weights, and a resume continues the average."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from hasten import Trainer, TrainingArguments
from hasten.errors import ConfigError
from hasten.runtime.context import ProcessContext
from hasten.testing.pool import ranks


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 1)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        out = self.linear(x).squeeze(-1)
        return {"loss": (out - labels).pow(2).mean(), "logits": out}


def rows(count: int = 16) -> list[dict[str, Any]]:
    draw = torch.Generator().manual_seed(3)
    return [
        {"x": torch.randn(4, generator=draw), "labels": torch.randn((), generator=draw)}
        for _ in range(count)
    ]


def trainer(folder: str, **options: Any) -> Trainer:
    args = TrainingArguments(
        output_dir=folder,
        use_cpu=True,
        per_device_train_batch_size=2,
        learning_rate=0.1,
        optim="sgd",
        lr_scheduler_type="constant",
        save_strategy="steps",
        save_steps=2,
        disable_tqdm=True,
        **options,
    )
    return Trainer(Net(), args, train_dataset=rows(), eval_dataset=rows(6))


@ranks(1, 2)
def test_evaluation_and_export_use_the_average(
    ctx: ProcessContext, tmp_path: Path
) -> None:
    where: str = ctx.world.broadcast_object(str(tmp_path))
    made = trainer(f"{where}/run", max_steps=4, ema_decay=0.5)
    made.train()
    assert made.ema is not None
    trained = {
        name: value.clone()
        for name, value in made.accelerator.unwrap_model(made.wrapped_model)
        .state_dict()
        .items()
    }
    with made.ema.swapped() as model:
        averaged = {name: value.clone() for name, value in model.state_dict().items()}
    assert not torch.equal(averaged["linear.weight"], trained["linear.weight"])
    net = Net()
    net.load_state_dict(averaged)
    data = rows(6)
    out = net(
        torch.stack([row["x"] for row in data]),
        torch.stack([row["labels"] for row in data]),
    )
    assert made.evaluate()["eval_loss"] == pytest.approx(
        float(out["loss"].detach()), rel=1e-5
    )
    made.save_model(f"{where}/export")
    stored = load_file(f"{where}/export/model.safetensors")
    assert all(torch.equal(stored[name], value) for name, value in averaged.items())
    again = trainer(
        f"{where}/run",
        max_steps=4,
        ema_decay=0.5,
        resume_from_checkpoint=f"{where}/run/checkpoints/checkpoint_0",
    )
    again.train()
    assert again.ema is not None
    with again.ema.swapped() as model:
        assert all(
            torch.equal(model.state_dict()[name], value)
            for name, value in averaged.items()
        )


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"ema_decay=1.5 is outside"):
        TrainingArguments(output_dir="x", ema_decay=1.5)
    with pytest.raises(ConfigError, match="chose it by the averaged weights"):
        TrainingArguments(
            output_dir="x",
            ema_decay=0.9,
            load_best_model_at_end=True,
            eval_strategy="steps",
            save_strategy="steps",
            eval_steps=500,
        )
