"""Agreement of ranks: votes, a flag any rank can raise, and work in which a failure on one rank is raised on all."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from hasten import errors
from hasten.comm.base import Comm
from hasten.errors import CheckpointError, HastenError, MissingRanksError, PeerFailedError


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


class Flag:
    """Raised on one rank, seen on all at the next `check`."""

    def __init__(self, comm: Comm) -> None:
        self._comm = comm
        self._raised = False

    def set(self) -> None:
        """Raise the flag on this rank. Ranks: any."""
        self._raised = True

    def check(self) -> bool:
        """Return whether any rank has raised it since the last time it was seen. Ranks: every rank of the group."""
        if self._comm.size > 1:
            mine = torch.tensor([self._raised], dtype=torch.int32)
            self._raised = bool(self._comm.all_reduce(mine, "max").item())
        seen, self._raised = self._raised, False
        return seen


Failure = tuple[str, str, str]  # what the rank was doing, the error's class and its text


class Agreement:
    """The meeting points of an `agreeing` block."""

    def __init__(self, comm: Comm, label: str) -> None:
        self.comm = comm
        self.label = label
        """What the ranks are doing, for messages; may be changed within the block."""

    def share(self, value: Any = None) -> list[Any]:  # Any: plain values of the caller's
        """Return every rank's value, in order of rank. Ranks: every rank, at the same point of the block.

        Raises: the error of the rank that has left the block with one.
        """
        return [value] if self.comm.size == 1 else self._exchange(None, value)

    def fail(self, error: Exception) -> None:
        """Tell the other ranks, which are at their next meeting point or on their way to it. Raises: always."""
        own = error if isinstance(error, HastenError) else self._wrapped(error)
        if self.comm.size == 1:
            own.agreed = True
            raise own
        self._exchange(own, None)

    def _wrapped(self, error: Exception) -> CheckpointError:
        where = self.comm.ranks[self.comm.rank]
        made = CheckpointError(f"{self.label} failed on rank {where}: {type(error).__name__}: {error}")
        made.__cause__ = error
        return made

    def _exchange(self, error: HastenError | None, value: Any) -> list[Any]:
        told = None if error is None else (self.label, type(error).__name__, str(error))
        try:
            everyone: list[tuple[Failure | None, Any]] = self.comm.all_gather_object((told, value))
        except RuntimeError as problem:
            raise self._lost(problem, error) from problem
        failed = {rank: told for rank, (told, _) in zip(self.comm.ranks, everyone, strict=True) if told is not None}
        if failed:
            raise self._joint(failed) from error
        return [value for _, value in everyone]

    def _joint(self, failed: Mapping[int, Failure]) -> HastenError:
        """Return the error that every rank raises: one class and one message, whichever rank asks."""
        label, kind, first = next(iter(failed.values()))
        if len(failed) == self.comm.size and len({told[1:] for told in failed.values()}) == 1:
            text = first
        else:
            quoted: dict[tuple[str, str], list[int]] = {}
            for rank, told in failed.items():
                quoted.setdefault(told[1:], []).append(rank)
            lines = (
                f"rank {', '.join(map(str, ranks))} raised {name}: {said.rstrip('.')}"
                for (name, said), ranks in quoted.items()
            )
            text = f"{label}: {'; '.join(lines)}. Every rank stops here, so that none waits for another."
        known = getattr(errors, kind, CheckpointError)
        agreed: HastenError = known(text)
        agreed.agreed = True
        return agreed

    def _lost(self, problem: Exception, own: HastenError | None) -> CheckpointError:
        """Return a group that cannot meet cannot agree either: nothing more is sent over it."""
        besides = "" if own is None else f" This rank had failed with {type(own).__name__}: {own}"
        lost = CheckpointError(
            f"{self.label}: rank {self.comm.ranks[self.comm.rank]} lost contact with the other ranks ({problem}), so they "
            f"cannot finish together. Look for the error that ended one of them.{besides}"
        )
        lost.agreed = True
        return lost


@contextmanager
def agreeing(comm: Comm, label: str, arrival_s: float | None = None) -> Iterator[Agreement]:
    """Run the block on every rank and leave it together: if one rank fails anywhere in it, all raise its error.

    Within the block ranks communicate through `Agreement.share` alone, or directly after a `share`, with nothing in
    between that can fail on one rank: a rank that fails sends its error instead of its next value. Blocks may be nested.
    `arrival_s` is how long the ranks wait for each other at the beginning; None means that they have met already.
    Raises: CheckpointError, or the rank's own hasten error, of one class and with one message on every rank.
    """
    if arrival_s is not None:
        _meet(comm, label, arrival_s)
    together = Agreement(comm, label)
    try:
        yield together
    except Exception as error:  # any failure must reach the other ranks; raised again by `fail`
        if not (isinstance(error, HastenError) and error.agreed):
            together.fail(error)
        raise
    together.share()


def _meet(comm: Comm, label: str, arrival_s: float) -> None:
    try:
        comm.barrier(label, arrival_s)
    except MissingRanksError as error:
        raise MissingRanksError(
            f"{error} If they do come, only later, raise checkpoint_arrival_s in ProjectConfiguration.", error.missing
        ) from None
