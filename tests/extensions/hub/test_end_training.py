"""The end of a training: everything is closed, then the first error is raised."""

from __future__ import annotations

from pathlib import Path

import pytest

from hasten import Accelerator
from hasten.accelerator.components import components
from hasten.errors import CheckpointError, HubError


def test_end_training_closes_everything_and_raises_the_first_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail_save() -> None:
        raise CheckpointError("the save failed")

    def fail_upload() -> None:
        raise HubError("the upload failed")

    accelerator = Accelerator(cpu=True, project_dir=str(tmp_path), log_with="jsonl")
    accelerator.init_trackers("run")
    accelerator.log({"loss": 1.0})
    monkeypatch.setattr(components(accelerator).saving, "close", fail_save)
    monkeypatch.setattr(components(accelerator).publishing, "wait", fail_upload)
    with pytest.raises(CheckpointError, match="the save failed"):
        accelerator.end_training()
    lines = next(tmp_path.rglob("metrics.jsonl")).read_text("utf-8").splitlines()
    assert '"finished":"failed"' in lines[-1]
    monkeypatch.undo()
    accelerator.end_training()  # nothing is left to be closed
