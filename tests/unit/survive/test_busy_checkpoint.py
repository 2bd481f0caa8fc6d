"""Saves of a replica while a lost one still holds the folder of a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hasten import Accelerator
from hasten.checkpoint.store.local_store import LocalStore
from hasten.errors import CheckpointBusyError


def test_the_next_number_is_taken(tmp_path: Path) -> None:
    accelerator: Any = Accelerator(cpu=True, project_dir=str(tmp_path))
    draft = LocalStore(tmp_path / "checkpoints").begin("checkpoint_0")
    with pytest.raises(CheckpointBusyError):
        accelerator.save_state()  # without replicas that may be lost, another writer is an error
    accelerator._replica = type("Leader", (), {"leads": True})()
    assert Path(accelerator.save_state()).name == "checkpoint_1"
    draft.abort()
    assert Path(accelerator.save_state()).name == "checkpoint_2"
    accelerator._replica = None
    accelerator.end_training()


def test_a_folder_that_was_asked_for_is_not_replaced_by_another(tmp_path: Path) -> None:
    accelerator: Any = Accelerator(cpu=True, project_dir=str(tmp_path))
    accelerator._replica = type("Leader", (), {"leads": True})()
    draft = LocalStore(tmp_path).begin("best")
    with pytest.raises(CheckpointBusyError, match="best is being written"):
        accelerator.save_state(tmp_path / "best")
    draft.abort()
    accelerator._replica = None
    accelerator.end_training()
