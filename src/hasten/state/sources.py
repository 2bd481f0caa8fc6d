"""Where a run's state is loaded from: a folder that was named, a copy in memory, or the newest checkpoint on the disk."""

from __future__ import annotations

from pathlib import Path

from hasten.checkpoint.base import CheckpointStore
from hasten.checkpoint.rank_agreement import Agreement
from hasten.checkpoint.store.locate import join_place, locate_existing, open_store
from hasten.checkpoint.store.newest import newest_of_all, newest_step
from hasten.config.checkpoint import ProjectConfiguration
from hasten.errors import ConfigError
from hasten.runtime.logs import get_logger
from hasten.state.memory_copies import MemoryCopies

log = get_logger(__name__)


def automatic_root(project: ProjectConfiguration) -> str:
    """The folder of numbered checkpoints. Raises: ConfigError without a project_dir."""
    if project.project_dir is None:
        raise ConfigError(
            "no folder was given and project_dir is not set, so there is no place for checkpoints. Call "
            'save_state("folder"), or set project_dir (in ProjectConfiguration or the Accelerator).'
        )
    return join_place(project.project_dir, "checkpoints")


def find_source(
    project: ProjectConfiguration,
    memory: MemoryCopies | None,
    together: Agreement,
    input_dir: str | Path | None,
    must: bool,
) -> tuple[CheckpointStore, str, bool] | None:
    """Store and name of what is loaded, and whether it is a copy in memory; None if there is nothing and nothing `must` be.

    Ranks: every rank.
    """
    if input_dir is not None:
        together.label = f"looking for {input_dir}"
        return *locate_existing(input_dir), False
    together.label = "looking for the newest checkpoint"
    choice = memory.newest(together) if memory is not None else None
    if choice is not None or not must:
        on_disk = together.share(newest_step(automatic_root(project)) if project.project_dir else None)
        if memory is not None and choice is not None:
            if all(step is None or step <= choice.step for step in on_disk):
                return *memory.fetch(choice, together), True
            log.info("the newest checkpoint on the disk is newer than update %d in memory", choice.step)
        elif not must and set(on_disk) == {None}:
            return None
    store = open_store(automatic_root(project))
    return store, newest_of_all(store, together), False
