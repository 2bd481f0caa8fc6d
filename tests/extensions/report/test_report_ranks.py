"""The report of a real run on two processes that was stopped and went on."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from hasten import Accelerator, Trainer, TrainerCallback, TrainingArguments
from hasten.extensions.report import report_data
from hasten.extensions.report.command import main
from hasten.extensions.report.run_folder import read_run
from hasten.runtime.context import ProcessContext
from hasten.testing.pool import ranks
from hasten.testing.toys import seeded
from hasten.tracking.run_log import PARTS
from tests.support.toys import Blobs, Classifier, Rows, Scored


class Stop(TrainerCallback):
    """Saves and stops after an update."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_save = control.should_training_stop = state.global_step == 4


@ranks(2)
def test_the_wait_for_gradients_is_counted_as_communication(
    ctx: ProcessContext, tmp_path: Path
) -> None:
    """torch measures the exchange of the first backwards; rank 0 waits for rank 1, which is slow."""
    accelerator = Accelerator(project_dir=str(tmp_path))
    model: Any = seeded(Classifier)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    loader: Any = DataLoader(Blobs(80), batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for number, (x, y) in enumerate(loader):
        loss = torch.nn.functional.cross_entropy(model(x), y)
        time.sleep(0.05 * ctx.rank)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        if number == 6 and accelerator._run_log is not None:
            accelerator._run_log.flush()
    accelerator.end_training()
    ctx.world.barrier("trained")
    (rank_log,) = (log for log in read_run(tmp_path).ranks if log.rank == ctx.rank)
    waited = float(rank_log.steps["communication"][-2:].mean())
    assert (waited > 0.02) == (ctx.rank == 0), waited


@ranks(2)
def test_both_ranks_and_the_restart_are_in_the_report(
    ctx: ProcessContext, tmp_path: Path
) -> None:
    for callbacks in ([Stop()], []):
        args = TrainingArguments(
            str(tmp_path), num_train_epochs=2, per_device_train_batch_size=4, logging_steps=1, save_strategy="no",
            eval_strategy="epoch", disable_tqdm=True,
        )  # fmt: skip
        trainer = Trainer(
            seeded(Scored),
            args,
            train_dataset=Rows(),
            eval_dataset=Rows(8),
            callbacks=callbacks,
        )
        trainer.train(resume_from_checkpoint="auto")
    ctx.world.barrier("trained")
    if ctx.rank != 0:
        return
    run = read_run(tmp_path)
    assert run.curves["loss"].steps.tolist() == list(range(1, 11))
    assert [
        log["loss"] for log in trainer.state.log_history if "loss" in log
    ] == run.curves["loss"].values.tolist()
    assert sorted((log.rank, len(log.steps)) for log in run.ranks) == [
        (0, 4),
        (0, 6),
        (1, 4),
        (1, 6),
    ]
    assert all((log.steps["communication"] > 0).any() for log in run.ranks)
    kinds = [event["event"] for event in run.events]
    assert kinds == ["started", "saved", "ended", "restarted", "loaded", "ended"]
    titles = [chart["title"] for chart in report_data.all_charts([run])]
    assert titles[:4] == ["loss", "eval_loss", "learning_rate", "grad_norm"]
    assert titles[-2:] == ["throughput (samples/s)", "time of a step by part (ms)"]
    (stacked_chart,) = (
        chart
        for chart in report_data.all_charts([run])
        if chart["title"] == "time of a step by part (ms)"
    )
    assert [trace["name"] for trace in stacked_chart["traces"]] == list(PARTS)
    assert main([str(tmp_path), "-o", str(tmp_path / "report.html")]) == 0
    assert (tmp_path / "report.html").stat().st_size > 10_000
