"""The newest checkpoint of a folder, on machines that may see different ones."""

from __future__ import annotations

import logging

from hasten.checkpoint.base import CheckpointStore
from hasten.checkpoint.rank_agreement import Agreement
from hasten.checkpoint.store.locate import newest, number_of, open_store, tell_passed_over
from hasten.errors import CheckpointError

log = logging.getLogger(__name__)


def newest_of_all(store: CheckpointStore, together: Agreement) -> str:
    """The newest checkpoint that every rank has. Ranks: every rank.

    Raises: IncompleteCheckpointError when there is none; CheckpointError when ranks have none in common.
    """
    name = newest(store)
    seen: list[str] = together.share(name)
    is_main = together.comm.rank == 0
    if len(set(seen)) > 1:  # machines with disks of their own: take the newest that all of them have
        name = min(seen, key=lambda item: number_of(item) or 0)
        if not all(together.share(store.complete(name))):
            raise CheckpointError(
                f"ranks see different newest checkpoints ({sorted(set(seen))}) and {name} is not complete "
                "everywhere. Give the path of one that every machine has."
            )
        if is_main:
            log.warning(
                "ranks see different newest checkpoints (%s); %s is loaded, which all have", sorted(set(seen)), name
            )
    if is_main:
        tell_passed_over(store, name)
    return name


def newest_step(root: str) -> int | None:
    """The updates behind the newest complete checkpoint in a folder, as this rank sees it; None when there is none."""
    try:
        store = open_store(root)
        return store.manifest(newest(store)).step or 0
    except (CheckpointError, OSError):  # said when it is the disk that is loaded from
        return None
