"""The Trainer on one process: callbacks, the best model, limits, streams, batch size search, smoothing, preemption."""

from __future__ import annotations

import math
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset as HubDataset
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from hasten import (
    PREEMPTED_EXIT_CODE,
    EarlyStoppingCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    read_metrics,
)
from hasten.errors import ArgumentError, ConfigError, ContradictionError
from hasten.extensions.trainer.callbacks import EVENTS
from hasten.extensions.trainer.settings import accelerator_settings
from hasten.testing.toys import TinyLM, next_token_loss, seeded
from tests.support.toys import Rows, Scored


def make(
    folder: Path,
    callbacks: Any = (),
    model: nn.Module | None = None,
    data: Any = None,
    **changes: Any,
) -> Trainer:
    plain: dict[str, Any] = {
        "num_train_epochs": 1,
        "save_strategy": "no",
        "disable_tqdm": True,
        "learning_rate": 1e-2,
    }
    rows = Rows() if data is None else data
    args = TrainingArguments(str(folder), **{**plain, **changes})
    return Trainer(
        model or seeded(Scored),
        args,
        train_dataset=rows,
        eval_dataset=Rows(9),
        callbacks=callbacks,
    )


def recorder(events: list[str]) -> TrainerCallback:
    """A callback that writes down every event."""

    def noting(event: str) -> Any:
        return lambda self, args, state, control, **kwargs: events.append(event)

    callback: TrainerCallback = type(
        "Recorder", (TrainerCallback,), {event: noting(event) for event in EVENTS}
    )()
    return callback


def test_events_come_in_order(tmp_path: Path) -> None:
    events: list[str] = []
    changes: dict[str, Any] = {
        "gradient_accumulation_steps": 2,
        "max_steps": 2,
        "logging_steps": 2,
    }
    trainer = make(
        tmp_path, [recorder(events)], save_strategy="steps", save_steps=2, **changes
    )
    trainer.train()
    step = [
        "on_step_begin",
        "on_substep_end",
        "on_pre_optimizer_step",
        "on_optimizer_step",
        "on_step_end",
    ]
    begin = ["on_init_end", "on_train_begin", "on_epoch_begin"]
    assert events == [
        *begin,
        *step,
        *step,
        "on_log",
        "on_save",
        "on_epoch_end",
        "on_log",
        "on_train_end",
    ]
    events.clear()
    trainer.predict(Rows(3))
    assert events == ["on_prediction_step", "on_predict"]
    with pytest.raises(ArgumentError, match="derive it from"):
        trainer.add_callback(print)  # type: ignore[arg-type]


class Scores(TrainerCallback):
    """Replaces the evaluation's loss by scores of a list, before anything looks at it."""

    def __init__(self, scores: list[float]) -> None:
        self.scores = scores

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        kwargs["metrics"]["eval_score"] = self.scores.pop(0)


def test_the_best_model_is_kept_and_loaded(tmp_path: Path) -> None:
    weights: list[Tensor] = []

    class Keep(TrainerCallback):
        def on_evaluate(
            self, args: Any, state: Any, control: Any, **kwargs: Any
        ) -> None:
            weights.append(kwargs["model"].body.head.weight.detach().clone())

    changes: dict[str, Any] = {
        "eval_strategy": "steps",
        "eval_steps": 1,
        "save_strategy": "steps",
        "save_steps": 1,
    }
    trainer = make(
        tmp_path, [Scores([0.1, 0.9, 0.3, 0.2, 0.0]), Keep()], load_best_model_at_end=True, metric_for_best_model="score",
        save_total_limit=1, **changes,
    )  # fmt: skip
    trainer.train()
    assert trainer.state.best_metric == 0.9
    assert trainer.state.best_global_step == 2
    assert torch.equal(trainer.model.get_parameter("body.head.weight"), weights[1])
    checkpoint_names = sorted(
        path.name
        for path in (tmp_path / "checkpoints").iterdir()
        if path.name.startswith("checkpoint")
    )
    assert checkpoint_names == ["checkpoint_1", "checkpoint_4"]


def test_only_better_models_are_saved_and_stopping_is_early(tmp_path: Path) -> None:
    changes: dict[str, Any] = {
        "eval_strategy": "steps",
        "eval_steps": 1,
        "metric_for_best_model": "score",
    }
    callbacks = [Scores([0.5, 0.6, 0.4, 0.55, 0.9]), EarlyStoppingCallback(2)]
    trainer = make(
        tmp_path,
        callbacks,
        save_strategy="best",
        per_device_train_batch_size=4,
        **changes,
    )
    trainer.train()
    assert trainer.state.global_step == 4
    assert len(list((tmp_path / "checkpoints").glob("checkpoint_*"))) == 2
    assert trainer.state.callbacks == {
        "1.EarlyStoppingCallback": {"best": 0.6, "waited": 0}
    }
    with pytest.raises(ConfigError, match="eval_nothing"):
        make(
            tmp_path,
            save_strategy="best",
            **{**changes, "metric_for_best_model": "nothing"},
        ).train()
    with pytest.raises(ConfigError, match="set eval_strategy"):
        make(tmp_path, [EarlyStoppingCallback()]).train()


class Stream(IterableDataset[Any]):
    """Rows without a length."""

    def __iter__(self) -> Iterator[Any]:
        yield from (Rows()[index] for index in range(40))


def test_streams_and_hub_datasets_train(tmp_path: Path) -> None:
    assert make(tmp_path, data=Stream(), max_steps=7).train().global_step == 7
    rows = [Rows()[index] for index in range(40)]
    data = HubDataset.from_list([{**row, "x": row["x"].tolist()} for row in rows])  # type: ignore[attr-defined]
    trainer, plain = make(tmp_path, data=data), make(tmp_path)
    assert trainer.train().training_loss == plain.train().training_loss
    with pytest.raises(ArgumentError, match="train_dataset"):
        Trainer(Scored(), TrainingArguments(str(tmp_path))).train()
    with pytest.raises(ArgumentError, match="eval_dataset"):
        Trainer(Scored(), TrainingArguments(str(tmp_path))).evaluate()
    with pytest.raises(ArgumentError, match=r"torch\.nn\.Module"):
        Trainer("bert")  # type: ignore[arg-type]


class TextModel(nn.Module):
    """A language model with blocks that returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = TinyLM()

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        return next_token_loss(self.inner(tokens), labels)


def test_recomputing_changes_memory_and_not_weights(tmp_path: Path) -> None:
    rows = [
        {"tokens": torch.arange(n, n + 8), "labels": torch.arange(n + 1, n + 9)}
        for n in range(16)
    ]
    weights = []
    for recompute in (False, True):
        trainer = make(
            tmp_path,
            model=seeded(TextModel),
            data=rows,
            gradient_checkpointing=recompute,
        )
        trainer.train()
        weights.append([p.detach() for p in trainer.model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))


def test_a_batch_without_labels_says_so(tmp_path: Path) -> None:
    with pytest.raises(
        ArgumentError, match=r"The batch has no labels.*add them to the samples"
    ):
        make(tmp_path, data=[{"x": Rows()[i]["x"]} for i in range(8)]).train()


@pytest.mark.parametrize(("num_labelled", "expected"), [(4, True), (0, False)])
def test_micro_batches_without_labels_do_not_spoil_the_logged_loss(
    tmp_path: Path, num_labelled: int, expected: bool
) -> None:
    rows = [
        {
            "x": Rows()[i]["x"],
            "labels": Rows()[i]["label"] if i < num_labelled else torch.tensor(-100),
        }
        for i in range(8)
    ]
    changes: dict[str, Any] = {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 4,
        "logging_steps": 1,
        "max_steps": 2,
    }
    trainer = make(tmp_path, data=rows, **changes)
    trainer.train()
    losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
    assert all(map(math.isfinite, losses))
    assert bool(losses) is expected
    # no labels at all: no mean
    assert math.isfinite(trainer.state.log_history[-1]["train_loss"]) is expected


def test_settings_of_an_optimizer_given_ready_made_are_refused(tmp_path: Path) -> None:
    model = seeded(Scored)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    args = TrainingArguments(str(tmp_path), learning_rate=1e-2)
    with pytest.raises(
        ContradictionError,
        match=r"learning_rate=0\.01 would have no effect.*set this when you create it",
    ):
        Trainer(model, args, train_dataset=Rows(), optimizers=(optimizer, None))
    Trainer(
        model,
        TrainingArguments(str(tmp_path), warmup_steps=2),
        train_dataset=Rows(),
        optimizers=(optimizer, None),
    )


def test_a_pipe_gets_a_line_for_every_log_and_evaluation_and_the_reason_of_the_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes: dict[str, Any] = {
        "num_train_epochs": 20,
        "logging_steps": 2,
        "eval_strategy": "epoch",
        "disable_tqdm": False,
    }
    stopping = EarlyStoppingCallback(3, early_stopping_threshold=100.0)
    trainer = make(tmp_path, [stopping], **changes)
    trainer.train()
    lines = capsys.readouterr().err.splitlines()
    history = trainer.state.log_history
    for log in history:
        name = next(name for name in ("loss", "eval_loss", "train_loss") if name in log)
        assert (
            sum(
                f"step {log['step']}/100 | {name} {log[name]:.4g} |" in line
                for line in lines
            )
            == 1
        )
    assert sum("eval_loss" in log for log in history) == 4
    assert sum("| eval_loss" in line for line in lines if line.startswith("step")) == 4
    assert (
        lines[-1]
        == "stopped at step 20/100: early stopping: eval_loss has not improved for 3 evaluations"
    )


def test_the_end_that_a_callback_asked_for_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Enough(TrainerCallback):
        def on_step_end(
            self, args: Any, state: Any, control: Any, **kwargs: Any
        ) -> None:
            control.should_training_stop = True

    make(tmp_path, [Enough()], disable_tqdm=False).train()
    assert (
        "stopped at step 1/5: requested by a callback"
        in capsys.readouterr().err.splitlines()[-1]
    )
    make(tmp_path, disable_tqdm=False).train()
    assert "stopped" not in capsys.readouterr().err


def test_logs_reach_history_and_trackers(tmp_path: Path) -> None:
    trainer = make(
        tmp_path,
        logging_steps=2,
        report_to="jsonl",
        run_name="mine",
        eval_strategy="epoch",
    )
    trainer.train()
    (run,) = (tmp_path / "mine").iterdir()
    rows = read_metrics(run)
    assert [row["loss"] for row in rows if "loss" in row] == [
        log["loss"] for log in trainer.state.log_history if "loss" in log
    ]
    assert {"loss", "grad_norm", "learning_rate", "epoch"} <= set(rows[0])
    assert any("eval_loss" in row for row in rows)
    assert "train_runtime" in rows[-1]


class Signal(TrainerCallback):
    """Sends this process a signal after an update."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 3:
            signal.raise_signal(signal.SIGTERM)


def test_a_preempted_run_saves_exits_and_goes_on(tmp_path: Path) -> None:
    uninterrupted = make(tmp_path / "whole")
    uninterrupted.train()
    with pytest.raises(SystemExit) as ended:
        make(tmp_path, [Signal()]).train()
    assert ended.value.code == PREEMPTED_EXIT_CODE
    second = make(tmp_path)
    assert second.train(resume_from_checkpoint="auto").global_step == 5
    for resumed, expected in zip(
        second.model.parameters(), uninterrupted.model.parameters(), strict=True
    ):
        assert torch.equal(resumed, expected)


def test_auto_starts_fresh_without_a_checkpoint(tmp_path: Path) -> None:
    assert make(tmp_path).train(resume_from_checkpoint="auto").global_step == 5


def test_the_file_of_an_engine_reaches_it(tmp_path: Path) -> None:
    args = TrainingArguments(output_dir=str(tmp_path), deepspeed="zero3.json")
    settings = accelerator_settings(args, nn.Linear(1, 1))
    assert (settings["strategy"], settings["deepspeed_plugin"]["hf_ds_config"]) == (
        "deepspeed",
        "zero3.json",
    )


def test_saved_models_load_again(tmp_path: Path) -> None:
    trainer = make(tmp_path)
    trainer.train()
    folder = trainer.save_model(str(tmp_path / "model"))
    fresh = make(tmp_path, model=seeded(Scored, 5))
    fresh.accelerator.load_model(fresh.model_for_evaluation(), folder)
    assert fresh.evaluate()["eval_loss"] == trainer.evaluate()["eval_loss"]
