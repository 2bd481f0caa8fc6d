"""Choice of the checkpoint that a run loads: the newest on disk, or a copy in memory."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, Protocol

from hasten.checkpoint.base import CheckpointStore
from hasten.checkpoint.store.locate import (
    find_newest_of_all,
    join_location,
    locate_existing,
    open_store,
)
from hasten.comm.agreement import Agreement
from hasten.config.sections.loop import ProjectConfiguration
from hasten.errors import ConfigError, IncompleteCheckpointError

log = logging.getLogger(__name__)


class NewerStates(Protocol):
    """States of this run besides its checkpoints on the disk; provided by a part of the run."""

    # Any: a value with a `step`, of the part's own kind
    def newest(self, together: Agreement) -> Any:
        """Return the newest state; None if there is none. Ranks: every rank."""

    # Any: as `newest` returned it
    def fetch(self, choice: Any, together: Agreement) -> tuple[CheckpointStore, str]:
        """Return the store and name of a state. Ranks: every rank."""

    def loaded(self, step: int | None) -> None:
        """Handle the load of the state of this step; None: of a checkpoint from elsewhere."""


def automatic_root(project: ProjectConfiguration) -> str:
    """Return the folder of numbered checkpoints. Raises: ConfigError without a project_dir."""
    if project.project_dir is None:
        raise ConfigError(
            "no folder was given and project_dir is not set, so there is no place for checkpoints. Call "
            'save_state("folder"), or set project_dir (in ProjectConfiguration or the Accelerator).'
        )
    return join_location(project.project_dir, "checkpoints")


def find_source(
    project: ProjectConfiguration,
    newer_states: NewerStates | None,
    agreement: Agreement,
    input_dir: str | Path | None,
    must_exist: bool,
) -> tuple[CheckpointStore, str, bool] | None:
    """Return store and name of the state to load, and whether it is in memory; None if there is none and not `must_exist`.

    Only a place without any checkpoint is "none". Ranks: every rank.
    Raises: CheckpointError for checkpoints that cannot be used, so that no run starts anew over them.
    """
    if input_dir is not None:
        agreement.label = f"looking for {input_dir}"
        return *locate_existing(input_dir), False
    agreement.label = "looking for the newest checkpoint"
    memory_choice = newer_states.newest(agreement) if newer_states is not None else None
    if project.project_dir is None and (memory_choice is not None or not must_exist):
        if newer_states is None or memory_choice is None:
            return None
        return (*newer_states.fetch(memory_choice, agreement), True)
    store = open_store(automatic_root(project))
    checkpoint_name = find_newest_of_all(store, agreement)
    if newer_states is not None and memory_choice is not None:
        if checkpoint_name is None:
            saved_step = None
        else:
            saved_step = store.manifest(checkpoint_name).step
        if all(
            rank_step is None or rank_step <= memory_choice.step
            for rank_step in agreement.share(saved_step)
        ):
            return *newer_states.fetch(memory_choice, agreement), True
        if agreement.comm.rank == 0:
            log.info(
                "the newest checkpoint on the disk is newer than update %d in memory",
                memory_choice.step,
            )
    if checkpoint_name is not None:
        return store, checkpoint_name, False
    if must_exist:
        raise IncompleteCheckpointError(
            f"there is no checkpoint in {store.address}. Save one first, give the path of another, or call "
            "load_state(must_exist=False) in a script that also makes the first start."
        )
    return None
