"""Laws of the Trainer: it is the hand-written loop bit for bit, an interrupted run is the whole one, metrics see each sample once."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from hasten import (
    Accelerator,
    DataLoaderConfiguration,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)
from hasten.runtime.context import ProcessContext
from hasten.testing.pool import ranks
from hasten.testing.toys import seeded
from hasten.trainer import (
    DataCollatorWithPadding,
    EvalPrediction,
    default_data_collator,
    get_scheduler,
)
from tests.support.toys import Rows, Scored, Tagged, Tagger


class StopAt(TrainerCallback):
    """Saves and stops after a number of batches; in the middle of an accumulation window, at its end."""

    def __init__(self, batches: int) -> None:
        self.left = batches

    def _count(self, control: Any) -> None:
        self.left -= 1
        if self.left == 0:
            control.should_save = control.should_training_stop = True

    def on_substep_end(
        self, args: Any, state: Any, control: Any, **kwargs: Any
    ) -> None:
        self._count(control)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._count(control)


def arguments(folder: Path, **changes: Any) -> TrainingArguments:
    plain: dict[str, Any] = {
        "num_train_epochs": 2,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "learning_rate": 3e-2,
        "weight_decay": 0.1,
        "warmup_steps": 2,
        "logging_steps": 3,
        "save_strategy": "no",
        "disable_tqdm": True,
    }
    return TrainingArguments(str(folder), **{**plain, **changes})


def make(folder: Path, stop: int | None = None, **changes: Any) -> Trainer:
    callbacks = [] if stop is None else [StopAt(stop)]
    return Trainer(
        seeded(Scored),
        arguments(folder, **changes),
        train_dataset=Rows(),
        callbacks=callbacks,
    )


def fingerprint(trainer: Trainer) -> list[Tensor]:
    weights = [
        t.detach().clone()
        for t in trainer.accelerator.unwrap_model(trainer.wrapped_model)
        .state_dict()
        .values()
    ]
    for values in trainer.optimizer.state.values():
        weights += [value.clone() for value in values.values()]
    return [t.to_local() if hasattr(t, "to_local") else t for t in weights]


def hand_written(folder: Path, epochs: int = 2) -> list[Tensor]:
    """What the Trainer does, written as a loop on the Accelerator."""
    accelerator = Accelerator(
        gradient_accumulation_steps=2,
        project_dir=str(folder),
        dataloader_config=DataLoaderConfiguration(data_seed=42),
    )
    model: Any = seeded(Scored)
    set_seed(42, device_specific=True, rank=accelerator.process_index)
    loader: Any = DataLoader(Rows(), batch_size=4, shuffle=True, collate_fn=_only_used)
    loader = accelerator.prepare(loader)
    matrices, vectors = [
        [p for p in model.parameters() if (p.ndim >= 2) is big] for big in (True, False)
    ]
    groups = [
        {"params": matrices, "weight_decay": 0.1},
        {"params": vectors, "weight_decay": 0.0},
    ]
    optimizer: Any = torch.optim.AdamW(groups, lr=3e-2)
    scheduler: Any = get_scheduler(
        "linear", optimizer, 2, accelerator.num_updates(loader, epochs)
    )
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    for _ in range(epochs):
        model.train()
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch)["loss"]
                accelerator.backward(loss, weight=(batch["labels"] != -100).sum())
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
    accelerator.end_training()
    return [p.detach() for p in accelerator.unwrap_model(model).state_dict().values()]


def _only_used(samples: list[Any]) -> Any:
    return default_data_collator(
        [{"x": sample["x"], "label": sample["label"]} for sample in samples]
    )


@ranks(1, 2)
def test_trainer_is_the_hand_written_loop_bit_for_bit(
    ctx: ProcessContext, tmp_path: Path
) -> None:
    trainer = make(tmp_path)
    trainer.train()
    expected = hand_written(tmp_path)
    for actual, reference in zip(fingerprint(trainer), expected, strict=False):
        assert torch.equal(actual, reference)
    losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
    assert losses[-1] < losses[0]


def interrupted_equals_whole(folder: Path, stops: list[int], **changes: Any) -> None:
    uninterrupted = make(folder / "whole", **changes)
    output = uninterrupted.train()
    for stop in stops:
        first = make(folder / f"at{stop}", stop, **changes)
        first.train()
        # whatever happened before the resume must not matter
        torch.manual_seed(1000 + stop)
        second = make(folder / f"at{stop}", **changes)
        resumed_output = second.train(resume_from_checkpoint=True)
        for actual, expected in zip(
            fingerprint(second), fingerprint(uninterrupted), strict=True
        ):
            assert torch.equal(actual, expected), f"stopped after batch {stop}"
        assert resumed_output.global_step == output.global_step
        assert resumed_output.training_loss == pytest.approx(
            output.training_loss, rel=1e-6
        )
        assert second.state.epochs_done == uninterrupted.state.epochs_done
        shown = [
            [
                (log["step"], log["epoch"])
                for log in t.state.log_history
                if "loss" in log
            ]
            for t in (second, uninterrupted)
        ]
        assert shown[0] == shown[1], f"stopped after batch {stop}"


@ranks(2, exhaustive=(1,))
def test_a_run_stopped_at_any_batch_ends_as_the_whole_one(
    ctx: ProcessContext, tmp_path: Path
) -> None:
    last = 20 if ctx.world.size == 1 else 10
    stops = sorted(random.Random(ctx.world.size).sample(range(1, last), 4))
    # the end of the first epoch too
    interrupted_equals_whole(tmp_path, [*stops, last // 2])


@pytest.mark.exhaustive
@ranks(1, 2, timeout_s=300)
def test_a_run_stopped_at_every_batch_ends_as_the_whole_one(
    ctx: ProcessContext, tmp_path: Path
) -> None:
    interrupted_equals_whole(
        tmp_path, list(range(1, 19 if ctx.world.size == 1 else 10))
    )


@ranks(2)
def test_the_state_is_equal_on_every_rank(ctx: ProcessContext, tmp_path: Path) -> None:
    trainer = Trainer(
        seeded(Scored),
        arguments(tmp_path, eval_strategy="epoch", save_strategy="epoch"),
        train_dataset=Rows(),
        eval_dataset=Rows(7),
    )
    trainer.train()
    first, second = ctx.world.all_gather_object(trainer.state.state_dict())
    # or a checkpoint could not be loaded on another number of processes
    assert first == second


@ranks(2)
def test_sharded_training_stops_and_goes_on(
    ctx: ProcessContext, tmp_path: Path
) -> None:
    interrupted_equals_whole(tmp_path, [3], fsdp="full_shard")


@ranks(1, 2, 3)
def test_metrics_see_every_sample_once_and_in_order(
    ctx: ProcessContext, tmp_path: Path
) -> None:
    for length in (1, 5, 8, 13):
        data = Rows(length)
        predictions: list[EvalPrediction] = []

        def keep(
            prediction: EvalPrediction, predictions: list[EvalPrediction] = predictions
        ) -> dict[str, float]:
            predictions.append(prediction)
            return {
                "accuracy": float(
                    (prediction.predictions.argmax(-1) == prediction.label_ids).mean()
                )
            }

        args = arguments(tmp_path, per_device_eval_batch_size=4)
        trainer = Trainer(seeded(Scored), args, eval_dataset=data, compute_metrics=keep)
        metrics = trainer.evaluate()
        model = seeded(Scored).eval()
        batch = default_data_collator(
            [
                {"x": row["x"], "label": row["label"]}
                for row in map(data.__getitem__, range(length))
            ]
        )
        with torch.no_grad():
            expected = model(**batch)
        assert np.array_equal(predictions[0].label_ids, batch["labels"].numpy()), length
        np.testing.assert_allclose(
            predictions[0].predictions, expected["logits"].numpy(), rtol=1e-5, atol=1e-6
        )
        assert metrics["eval_loss"] == pytest.approx(float(expected["loss"]), rel=1e-5)


@ranks(1, 2)
def test_token_labels_of_different_lengths_are_predicted_exactly(
    ctx: ProcessContext, tmp_path: Path
) -> None:
    data = Tagged(11)
    trainer = Trainer(
        seeded(Tagger),
        arguments(tmp_path, per_device_eval_batch_size=2),
        DataCollatorWithPadding(pad_token_id=0),
        eval_dataset=data,
    )
    prediction = trainer.predict(data)
    model, total, count = seeded(Tagger), 0.0, 0
    for index in range(len(data)):
        row = DataCollatorWithPadding(pad_token_id=0)([data[index]])
        size = row["labels"].shape[1]
        assert prediction.label_ids[index, :size].tolist() == row["labels"][0].tolist()
        assert (prediction.label_ids[index, size:] == -100).all()
        with torch.no_grad():
            out = model(**row)
        np.testing.assert_allclose(
            prediction.predictions[index, :size],
            out["logits"][0].numpy(),
            rtol=1e-4,
            atol=1e-6,
        )
        total, count = total + float(out["loss"]) * size, count + size
    assert prediction.metrics["test_loss"] == pytest.approx(
        total / count, rel=1e-5
    )  # the mean over tokens, not over batches


@ranks(1, 2)
def test_gradients_weigh_tokens_and_not_batches(
    ctx: ProcessContext, tmp_path: Path
) -> None:
    data, world = Tagged(8), ctx.world.size
    args = arguments(
        tmp_path, per_device_train_batch_size=1, gradient_accumulation_steps=8 // world, max_steps=1, optim="sgd",
        learning_rate=1.0, max_grad_norm=0.0, warmup_steps=0, weight_decay=0.0, lr_scheduler_type="constant",
    )  # fmt: skip
    trainer = Trainer(
        seeded(Tagger),
        args,
        DataCollatorWithPadding(pad_token_id=0),
        train_dataset=data,
    )
    trainer.train()
    model = seeded(Tagger)
    batch = DataCollatorWithPadding(pad_token_id=0)([data[index] for index in range(8)])
    model(**batch)["loss"].backward()
    for parameter, trained_parameter in zip(
        model.parameters(), trainer.wrapped_model.parameters(), strict=True
    ):
        assert parameter.grad is not None
        torch.testing.assert_close(
            parameter - parameter.grad, trained_parameter, rtol=1e-4, atol=1e-6
        )
