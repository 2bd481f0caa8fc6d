"""Choice of the checkpoint that a run loads: the newest on disk, or a copy in memory."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, Protocol

from hasten.checkpoint.base import CheckpointStore
from hasten.checkpoint.format.manifest import MANIFEST_NAME, checkpoint_number
from hasten.checkpoint.store.local_store import (
    LocalStore,
    join_location,
    locate,
    open_store,
)
from hasten.comm.agreement import Agreement
from hasten.config.sections.loop import ProjectConfiguration
from hasten.errors import (
    CheckpointError,
    ConfigError,
    CorruptCheckpointError,
    IncompleteCheckpointError,
)

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


def locate_existing(location: str | Path) -> tuple[CheckpointStore, str]:
    """Return the store and name of a checkpoint to be read.

    Raises: IncompleteCheckpointError when its folder does not exist or is a file.
    """
    store, name = locate(location)
    if isinstance(store, LocalStore):
        checkpoint_path = Path(store.address, name)
        if checkpoint_path.is_file():
            has_manifest = (checkpoint_path.parent / MANIFEST_NAME).is_file()
            if has_manifest:
                hint = f"give the folder it is in, {checkpoint_path.parent}"
            else:
                hint = "give such a folder"
            raise IncompleteCheckpointError(
                f"{location} is a file; a checkpoint is a folder with {MANIFEST_NAME} in it, as save_state writes it: {hint}."
            )
        if not checkpoint_path.exists():
            raise IncompleteCheckpointError(
                f"{location} does not exist, so there is no checkpoint to load. Check the path (the current folder is "
                f"{Path.cwd()}); `hasten ckpt list {checkpoint_path.parent}` shows what is there."
            )
    return store, name


def find_newest(store: CheckpointStore, log_level: int = logging.WARNING) -> str | None:
    """Return the name of the newest complete numbered checkpoint; incomplete and damaged ones are skipped, which is logged.

    Only a place without any numbered checkpoint gives None.
    Raises: IncompleteCheckpointError when none of them is complete; CheckpointError for a newer one that cannot be read now, and
    CheckpointVersionError for one of another version of hasten, because an older one would take the run back.
    """
    numbers_by_name = {
        checkpoint_name: checkpoint_number(checkpoint_name)
        for checkpoint_name in store.names()
    }
    checkpoint_names = sorted(
        (
            checkpoint_name
            for checkpoint_name in numbers_by_name
            if numbers_by_name[checkpoint_name] is not None
        ),
        key=lambda checkpoint_name: numbers_by_name[checkpoint_name] or 0,
        reverse=True,
    )
    load_errors: list[CheckpointError] = []
    for checkpoint_name in checkpoint_names:
        try:
            store.check(checkpoint_name)
        except (IncompleteCheckpointError, CorruptCheckpointError) as error:
            load_errors.append(error)
            continue
        if load_errors:
            log.log(
                log_level,
                "using %s in %s and skipping newer ones: %s",
                checkpoint_name,
                store.address,
                " ".join(str(load_error) for load_error in load_errors),
            )
        return checkpoint_name
    if not checkpoint_names:
        return None
    raise IncompleteCheckpointError(
        f"{store.address} has checkpoints ({', '.join(checkpoint_names[:4])}) and none is complete: {load_errors[0]} The run does not start anew over "
        f"them. `hasten ckpt verify` names all faults; delete {store.address} to start anew, or give the path of another checkpoint."
    )


def find_newest_of_all(store: CheckpointStore, agreement: Agreement) -> str | None:
    """Return the newest checkpoint that every rank has; None if no rank has any. Ranks: every rank.

    Raises: as `newest`; CheckpointError when ranks have none in common.
    """
    log_level = logging.WARNING if agreement.comm.rank == 0 else logging.DEBUG
    names_of_ranks: list[str | None] = agreement.share(find_newest(store, log_level))
    if len(set(names_of_ranks)) == 1:
        return names_of_ranks[0]
    # machines with separate disks
    numbers_of_ranks = [
        -1 if checkpoint_name is None else checkpoint_number(checkpoint_name) or 0
        for checkpoint_name in names_of_ranks
    ]
    oldest_name = names_of_ranks[numbers_of_ranks.index(min(numbers_of_ranks))]
    if oldest_name is None or not all(agreement.share(is_complete(store, oldest_name))):
        raise CheckpointError(
            f"ranks see different newest checkpoints ({sorted(map(str, set(names_of_ranks)))}), and have none in common. Give the path of "
            "one that every machine has."
        )
    if agreement.comm.rank == 0:
        log.warning(
            "ranks see different newest checkpoints (%s); %s is loaded, which all have",
            set(names_of_ranks),
            oldest_name,
        )
    return oldest_name


def is_complete(store: CheckpointStore, checkpoint_name: str) -> bool:
    """Return True if the manifest is readable and every file has its size."""
    try:
        store.check(checkpoint_name)
    except CheckpointError:  # loading it by name reports the problem
        return False
    return True
