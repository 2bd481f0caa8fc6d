"""Saves of a replica after a lost one has left a draft."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hasten import Accelerator
from hasten.checkpoint.store.local_store import LocalStore


def test_the_next_number_is_taken(tmp_path: Path) -> None:
    accelerator: Any = Accelerator(cpu=True, project_dir=str(tmp_path))
    draft = LocalStore(tmp_path / "checkpoints").begin("checkpoint_0")
    assert Path(accelerator.save_state()).name == "checkpoint_1"
    draft.abort()
    assert Path(accelerator.save_state()).name == "checkpoint_2"
    accelerator.end_training()
