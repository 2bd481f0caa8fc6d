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
    error_flag = torch.tensor([error is not None], dtype=torch.int32)
    if not comm.all_reduce(error_flag, "max").item():
        return
    error_texts = comm.all_gather_object(
        None if error is None else f"{type(error).__name__}: {error}"
    )
    if error is not None:
        raise error
    quoted_errors = "; ".join(
        f"rank {comm.ranks[member_index]} raised {error_text}"
        for member_index, error_text in enumerate(error_texts)
        if error_text is not None
    )
    raise PeerFailedError(
        f"{label}: {quoted_errors.rstrip('.')}. This rank stops here so that nobody waits forever; fix the error of the rank named first."
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
            raised_flag = torch.tensor([self._raised], dtype=torch.int32)
            self._raised = bool(self._comm.all_reduce(raised_flag, "max").item())
        was_raised = self._raised
        self._raised = False
        return was_raised


# the label of the rank's work, the error's class and its text
Failure = tuple[str, str, str]


@dataclass(slots=True)
class Agreement:
    """Exchange of values and errors inside an `agreeing` block."""

    comm: Comm
    label: str
    """Description of the ranks' work, for messages; may be changed within the block."""

    def share(self, value: Any = None) -> list[Any]:  # Any: plain values of the caller
        """Return every rank's value, in order of rank. Ranks: every rank, at the same point of the block.

        Raises: the error of a rank that left the block with one.
        """
        if self.comm.size == 1:
            return [value]
        return self._exchange_values(None, value)

    def fail_on_all(self, error: Exception) -> None:
        """Send the error to the other ranks in place of this rank's next value. Raises: always."""
        if isinstance(error, HastenError):
            joint_error = error
        else:
            joint_error = self._wrap_error(error)
        if self.comm.size == 1:
            joint_error.agreed = True
            raise joint_error
        self._exchange_values(joint_error, None)

    def _wrap_error(self, error: Exception) -> CheckpointError:
        global_rank = self.comm.ranks[self.comm.rank]
        wrapped_error = CheckpointError(
            f"{self.label} failed on rank {global_rank}: {type(error).__name__}: {error}"
        )
        wrapped_error.__cause__ = error
        return wrapped_error

    def _exchange_values(self, error: HastenError | None, value: Any) -> list[Any]:
        if error is None:
            failure = None
        else:
            failure = (self.label, type(error).__name__, str(error))
        try:
            reports_by_rank: list[tuple[Failure | None, Any]] = (
                self.comm.all_gather_object((failure, value))
            )
        except RuntimeError as problem:
            raise self._lost_error(problem, error) from problem
        failures_by_rank = {
            rank: failure
            for rank, (failure, _) in zip(self.comm.ranks, reports_by_rank, strict=True)
            if failure is not None
        }
        if failures_by_rank:
            raise self._joint_error(failures_by_rank) from error
        return [value for _, value in reports_by_rank]

    def _joint_error(self, failures_by_rank: Mapping[int, Failure]) -> HastenError:
        """Return the error that every rank raises, with the same class and message everywhere."""
        label, class_name, first_text = next(iter(failures_by_rank.values()))
        if (
            len(failures_by_rank) == self.comm.size
            and len({failure[1:] for failure in failures_by_rank.values()}) == 1
        ):
            joint_text = first_text
        else:
            ranks_by_error: dict[tuple[str, str], list[int]] = {}
            for rank, failure in failures_by_rank.items():
                ranks_by_error.setdefault(failure[1:], []).append(rank)
            quoted_errors = (
                f"rank {', '.join(map(str, failed_ranks))} raised {error_name}: {error_text.rstrip('.')}"
                for (error_name, error_text), failed_ranks in ranks_by_error.items()
            )
            joint_text = f"{label}: {'; '.join(quoted_errors)}. Every rank stops here, so that none waits for another."
        error_class = getattr(errors, class_name, CheckpointError)
        joint_error: HastenError = error_class(joint_text)
        joint_error.agreed = True
        return joint_error

    def _lost_error(
        self, group_error: Exception, rank_error: HastenError | None
    ) -> CheckpointError:
        """Return the error for a broken group, over which nothing more is sent."""
        if rank_error is None:
            earlier_failure = ""
        else:
            earlier_failure = (
                f" This rank had failed with {type(rank_error).__name__}: {rank_error}"
            )
        lost_error = CheckpointError(
            f"{self.label}: rank {self.comm.ranks[self.comm.rank]} lost contact with the other ranks ({group_error}), so they "
            f"cannot finish together. Look for the error that ended one of them.{earlier_failure}"
        )
        lost_error.agreed = True
        return lost_error


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
        _await_ranks(comm, label, arrival_s)
    agreement = Agreement(comm, label)
    try:
        yield agreement
    # any failure must reach the other ranks; raised again by `fail`
    except Exception as error:
        if not (isinstance(error, HastenError) and error.agreed):
            agreement.fail_on_all(error)
        raise
    agreement.share()


def _await_ranks(comm: Comm, label: str, arrival_s: float) -> None:
    try:
        comm.barrier(label, arrival_s)
    except MissingRanksError as error:
        raise MissingRanksError(
            f"{error} If they do come, only later, raise checkpoint_arrival_s in ProjectConfiguration.",
            error.missing,
        ) from None
