"""Votes: before ranks go on together, all of them know whether one has failed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from hasten.comm.base import Comm
from hasten.errors import PeerFailedError


def vote(comm: Comm, error: BaseException | None, label: str) -> None:
    """Return when no rank has an error; otherwise raise on every rank.

    The failing rank raises its own error; the others raise PeerFailedError that quotes it.
    Ranks: every rank of the group.
    """
    if comm.size == 1:
        if error is not None:
            raise error
        return
    failed = torch.tensor([error is not None], dtype=torch.int32)
    if not comm.all_reduce(failed, "max").item():
        return
    reports = comm.all_gather_object(None if error is None else f"{type(error).__name__}: {error}")
    if error is not None:
        raise error
    quoted = "; ".join(f"rank {comm.ranks[i]} raised {text}" for i, text in enumerate(reports) if text is not None)
    raise PeerFailedError(
        f"{label}: {quoted.rstrip('.')}. This rank stops here so that nobody waits forever; fix the error of the rank named first."
    )


@contextmanager
def agree(comm: Comm, label: str) -> Iterator[None]:
    """Run the block on every rank; leave it together, or raise on every rank if one failed."""
    try:
        yield
    except Exception as error:  # any error of the user's block has to reach the other ranks; it is re-raised here
        vote(comm, error, label)
        raise
    vote(comm, None, label)
