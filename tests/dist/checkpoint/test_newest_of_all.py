"""Machines whose disks hold different checkpoints: the newest that all of them have is loaded, and said."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from hasten import Accelerator, ProjectConfiguration
from hasten.errors import CheckpointError
from hasten.runtime.context import ProcessContext
from hasten.testing.pool import ranks


def made(folder: Path) -> tuple[Accelerator, Any]:  # Any: a prepared module
    project = ProjectConfiguration(
        project_dir=str(folder), automatic_checkpoint_naming=True
    )
    accelerator = Accelerator(project_config=project)
    torch.manual_seed(0)
    return accelerator, accelerator.prepare(torch.nn.Linear(2, 1))


class Said(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@ranks(2)
def test_the_newest_that_every_machine_has_is_loaded(
    ctx: ProcessContext, tmp_path: Path
) -> None:
    accelerator, model = made(tmp_path / "0")
    for value in (1.0, 2.0):
        with torch.no_grad():
            model.weight.fill_(value)
        accelerator.save_state()
    if ctx.is_main:
        shutil.copytree(tmp_path / "0", tmp_path / "1")
        shutil.rmtree(tmp_path / "1" / "checkpoints" / "checkpoint_1")
    ctx.world.barrier("copied")
    accelerator, model = made(tmp_path / str(ctx.rank))
    handler = Said()
    logging.getLogger("hasten").addHandler(handler)
    try:
        accelerator.load_state()
    finally:
        logging.getLogger("hasten").removeHandler(handler)
    assert model.weight.tolist() == [[1.0, 1.0]]
    assert (
        any("see different newest checkpoints" in line for line in handler.lines)
        == ctx.is_main
    )
    ctx.world.barrier("loaded")
    if ctx.is_main:
        shutil.rmtree(tmp_path / "0" / "checkpoints" / "checkpoint_0")
    ctx.world.barrier("deleted")
    with pytest.raises(
        CheckpointError, match="Give the path of one that every machine has"
    ):
        accelerator.load_state()
