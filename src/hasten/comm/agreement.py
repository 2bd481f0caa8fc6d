"""Agreement of ranks: votes, a flag that any rank can set, and blocks in which an error on one rank is raised on all."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from hasten import errors
from hasten.comm.base import Comm
from hasten.errors import (
    CheckpointError,
    HastenError,
    MissingRanksError,
    PeerFailedError,
)


def vote(comm: Comm, error: BaseException | None, label: str) -> None:
    """Raise on every rank if any rank has an error.

    The failing rank raises its error; the others raise PeerFailedError that quotes it.
    Ranks: every rank of the group.
    """
    if comm.size == 1:
        if error is not None:
            raise error
        return
    failed = torch.tensor([error is not None], dtype=torch.int32)
    if not comm.all_reduce(failed, "max").item():
        return
    reports = comm.all_gather_object(
        None if error is None else f"{type(error).__name__}: {error}"
    )
    if error is not None:
        raise error
    quoted = "; ".join(
        f"rank {comm.ranks[i]} raised {text}"
        for i, text in enumerate(reports)
        if text is not None
    )
    raise PeerFailedError(
        f"{label}: {quoted.rstrip('.')}. This rank stops here so that nobody waits forever; fix the error of the rank named first."
    )


@contextmanager
def agree(comm: Comm, label: str) -> Iterator[None]:
    """Context manager that runs its block on every rank, and raises on every rank if one failed."""
    try:
        yield
    # any error of the user's block has to reach the other ranks; it is re-raised here
    except Exception as error:
        vote(comm, error, label)
        raise
    vote(comm, None, label)


@dataclass(slots=True)
class Flag:
    """Flag that is set on one rank and seen on all at the next `check`."""

    _comm: Comm
    _raised: bool = False

    def set(self) -> None:
        """Set the flag on this rank. Ranks: any."""
        self._raised = True

    def check(self) -> bool:
        """Return whether any rank has set the flag since the last check, and clear it. Ranks: every rank of the group."""
        if self._comm.size > 1:
            mine = torch.tensor([self._raised], dtype=torch.int32)
            self._raised = bool(self._comm.all_reduce(mine, "max").item())
        seen, self._raised = self._raised, False
        return seen


# the label of the rank's work, the error's class and its text
Failure = tuple[str, str, str]


class Agreement:
    """Exchange of values and errors inside an `agreeing` block."""

    def __init__(self, comm: Comm, label: str) -> None:
        self.comm = comm
        self.label = label
        """Description of the ranks' work, for messages; may be changed within the block."""

    def share(self, value: Any = None) -> list[Any]:  # Any: plain values of the caller
        """Return every rank's value, in order of rank. Ranks: every rank, at the same point of the block.

        Raises: the error of a rank that left the block with one.
        """
        return [value] if self.comm.size == 1 else self._exchange(None, value)

    def fail(self, error: Exception) -> None:
        """Send the error to the other ranks in place of this rank's next value. Raises: always."""
        own = error if isinstance(error, HastenError) else self._wrapped(error)
        if self.comm.size == 1:
            own.agreed = True
            raise own
        self._exchange(own, None)

    def _wrapped(self, error: Exception) -> CheckpointError:
        where = self.comm.ranks[self.comm.rank]
        made = CheckpointError(
            f"{self.label} failed on rank {where}: {type(error).__name__}: {error}"
        )
        made.__cause__ = error
        return made

    def _exchange(self, error: HastenError | None, value: Any) -> list[Any]:
        told = None if error is None else (self.label, type(error).__name__, str(error))
        try:
            everyone: list[tuple[Failure | None, Any]] = self.comm.all_gather_object(
                (told, value)
            )
        except RuntimeError as problem:
            raise self._lost(problem, error) from problem
        failed = {
            rank: told
            for rank, (told, _) in zip(self.comm.ranks, everyone, strict=True)
            if told is not None
        }
        if failed:
            raise self._joint(failed) from error
        return [value for _, value in everyone]

    def _joint(self, failed: Mapping[int, Failure]) -> HastenError:
        """Return the error that every rank raises, with the same class and message everywhere."""
        label, kind, first = next(iter(failed.values()))
        if (
            len(failed) == self.comm.size
            and len({told[1:] for told in failed.values()}) == 1
        ):
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
        """Return the error for a broken group, over which nothing more is sent."""
        besides = (
            ""
            if own is None
            else f" This rank had failed with {type(own).__name__}: {own}"
        )
        lost = CheckpointError(
            f"{self.label}: rank {self.comm.ranks[self.comm.rank]} lost contact with the other ranks ({problem}), so they "
            f"cannot finish together. Look for the error that ended one of them.{besides}"
        )
        lost.agreed = True
        return lost


@contextmanager
def agreeing(
    comm: Comm, label: str, arrival_s: float | None = None
) -> Iterator[Agreement]:
    """Context manager that runs its block on every rank; if one rank fails anywhere in it, all raise its error.

    Within the block, ranks communicate only through `Agreement.share`, or directly after a `share`, with nothing in
    between that can fail on one rank: a rank that fails sends its error instead of its next value. Blocks may be nested.
    `arrival_s` is the time that ranks wait for each other at the start; None means that they are synchronised already.
    Raises: CheckpointError, or the hasten error of the failing rank, with the same class and message on every rank.
    """
    if arrival_s is not None and comm.size > 1:
        _meet(comm, label, arrival_s)
    together = Agreement(comm, label)
    try:
        yield together
    # any failure must reach the other ranks; raised again by `fail`
    except Exception as error:
        if not (isinstance(error, HastenError) and error.agreed):
            together.fail(error)
        raise
    together.share()


def _meet(comm: Comm, label: str, arrival_s: float) -> None:
    try:
        comm.barrier(label, arrival_s)
    except MissingRanksError as error:
        raise MissingRanksError(
            f"{error} If they do come, only later, raise checkpoint_arrival_s in ProjectConfiguration.",
            error.missing,
        ) from None
