"""Trackers with their real packages, offline: where one is installed, two runs of a project stay two, with their values."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from accelerate import Accelerator


def log_twice(name: str, folder: Path, options: dict[str, object]) -> None:
    """Run the same training twice: settings, values at steps, one value that no service plots."""
    for _ in range(2):
        accelerator = Accelerator(cpu=True, log_with=name, project_dir=str(folder))
        accelerator.init_trackers(
            "project", config={"lr": 0.1}, init_kwargs={name: dict(options)}
        )
        for step in range(3):
            accelerator.log({"loss": 1.0 / (step + 1), "words": [1, 2]}, step=step)
        assert accelerator.get_tracker(name, unwrap=True) is not None
        accelerator.end_training()


def test_runs_of_wandb_are_two_in_the_folder_of_the_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    log_twice("wandb", tmp_path / "elsewhere", {"group": "g"})
    assert len(list((tmp_path / "wandb").glob("offline-run-*"))) == 2
    assert not (tmp_path / "elsewhere" / "wandb").exists()


def test_runs_of_mlflow_are_two_with_their_metrics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file://{tmp_path / 'store'}")
    with caplog.at_level(logging.WARNING, "accelerate"):
        log_twice(
            "mlflow",
            tmp_path,
            {"run_name": "first", "tags": {"k": "v"}, "description": "d"},
        )
    client = mlflow.MlflowClient()
    runs = client.search_runs([client.get_experiment_by_name("project").experiment_id])
    assert [run.info.run_name for run in runs] == ["first", "first"]
    for run in runs:
        assert run.data.params == {"lr": "0.1"} and run.data.tags["k"] == "v"
        assert run.data.tags["mlflow.note.content"] == "d"
        assert [
            metric.value
            for metric in client.get_metric_history(run.info.run_id, "loss")
        ] == [1.0, 0.5, 1.0 / 3]
    assert (
        sum(
            "only accepts float and int types" in record.getMessage()
            for record in caplog.records
        )
        == 1
    )
