"""Divergence check: at a fixed interval of updates, ranks compare fingerprints of values that must be equal.

A check spans a few updates, so that no rank waits: fingerprints are computed on the device at one update and posted to the job's store at
the next; rank 0 compares them once all are posted, and the others poll for its verdict at each update. Names are exchanged only if
fingerprints differ. No collective is involved: a rank that has made more updates than another is reported, whereas a collective would
pair it with the wrong update.
"""

from __future__ import annotations

import logging
import time
import warnings
from collections import deque
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, Literal

import msgspec
import torch
from torch import Tensor
from torch.distributed import Store

from hasten.errors import DivergenceError, HastenWarning
from hasten.extensions.divergence.divergence import (
    EVIDENCE,
    Divergence,
    Record,
    find_divergence,
)
from hasten.extensions.divergence.fingerprint import Fingerprints, FingerprintStore
from hasten.extensions.divergence.replicas import ComparedTensor, Replicas
from hasten.optim.run_part import RunPart
from hasten.optim.window import Holder
from hasten.runtime.context import ProcessContext
from hasten.runtime.devices import kind_of
from hasten.runtime.mesh_plan import Axis
from hasten.runtime.store import LOST

log = logging.getLogger(__name__)

_UPDATES_UNTIL_HEARD: Final = 4
"""Updates after which every rank has seen an answer: those between two collectives, with a margin."""
_STALE_UPDATES: Final = 200
"""Updates after which a check is abandoned, because a rank never took part in it."""
_LAST_CHECK_S: Final = 60.0
_POLL_INTERVAL_S: Final = 0.001
_MASK: Final = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class DivergenceCheckSettings:
    """Interval of the comparison, and the reaction to a difference."""

    every: int = 100
    reaction: Literal["stop", "report"] = "stop"


class _Answer(msgspec.Struct, frozen=True):
    """Rank 0's diagnosis, and the moment at which every rank acts on it."""

    divergence: Divergence
    act_at: int


@dataclass(slots=True)
class _Check:
    """One check in progress: taken at one update, posted and concluded at later ones."""

    number: int
    step: int
    entries: list[ComparedTensor]
    values: Tensor
    """Fingerprints of the entries with tensors; on the host once `ready` has passed."""
    ready: torch.Event | None
    stage: Literal["taken", "posted", "shown", "answered", "known"] = "taken"
    answer: _Answer | None = None


class DivergenceCheck(RunPart):
    """One rank's side of the checks. Called by the training thread after each update."""

    def __init__(
        self,
        replicas: Replicas,
        ctx: ProcessContext,
        store: Store,
        settings: DivergenceCheckSettings,
    ) -> None:
        self._replicas = replicas
        self._ctx = ctx
        self._settings = settings
        self._store = FingerprintStore(store, ctx.rank, ctx.mesh)
        self._fingerprints = Fingerprints()
        self._pending_checks: deque[_Check] = deque()
        self._num_checks = 0
        self._agreed_at: int | None = None
        self._is_over = False
        """True once a difference was reported: the ranks stay different, so nothing more is compared."""

    def after_update(self, optimizer: Holder, applied: bool) -> None:
        """Advance pending checks after an optimizer update, and start a new one when due. Ranks: every rank.

        Raises: DivergenceError on every rank when the check of an earlier update has found a difference.
        """
        update_number = self._replicas.clock.num_updates
        if self._replicas.clock.trains_separately or self._is_over:
            self._pending_checks.clear()
            return
        if self._pending_checks:
            self._advance_checks(update_number)
        if update_number % self._settings.every == 0 or self._num_checks == 0:
            self._begin_check(update_number)

    def end(self) -> None:
        """Run a last check and wait for its result. Ranks: every rank, at the end of training."""
        if (
            self._replicas.clock.trains_separately
            or self._is_over
            or self._num_checks == 0
        ):
            return
        self._begin_check(self._replicas.clock.num_updates)
        deadline_s = time.monotonic() + _LAST_CHECK_S
        while self._pending_checks and time.monotonic() < deadline_s:
            self._advance_checks(None)
            time.sleep(_POLL_INTERVAL_S)
        if self._pending_checks:
            log.warning(
                "the last divergence check was skipped: not every rank reached it"
            )

    def _advance_checks(self, update_number: int | None) -> None:
        """Advance every check as far as possible without waiting; `step` is None at the end of training."""
        try:
            for check in list(self._pending_checks):
                if update_number is None or update_number > check.step:
                    self._advance_check(check, update_number)
        # the process that serves the store has exited, which is reported there
        except LOST:
            log.warning(
                "divergence checks stop here: the connection to the job's store is lost"
            )
            self._pending_checks.clear()

    def _advance_check(self, check: _Check, update_number: int | None) -> None:
        check_number = check.number
        if check.stage == "taken":
            self._post_sums(check)
            check.stage = "posted"
        if (
            check.stage == "posted"
            and (has_agreed := self._store.read_verdict(check_number)) is not None
        ):
            if has_agreed:
                self._agreed_at = check.step
                self._pending_checks.remove(check)
                return
            self._store.post_records(check_number, _make_records(check))
            check.stage = "shown"
        if (
            check.stage == "shown"
            and self._ctx.is_main
            and (records_by_rank := self._store.read_records(check_number)) is not None
        ):
            self._post_answer(check, records_by_rank)
            check.stage = "answered"
        if (
            check.stage in ("shown", "answered")
            and (encoded_answer := self._store.read_answer(check_number)) is not None
        ):
            check.answer = msgspec.json.decode(encoded_answer, type=_Answer)
            check.stage = "known"
        if check.stage == "known" and check.answer is not None:
            if update_number is None or self._shared_moment >= check.answer.act_at:
                self._act_on(check.answer.divergence)
        elif update_number is not None and update_number - check.step > _STALE_UPDATES:
            self._pending_checks.remove(check)

    def _post_answer(
        self, check: _Check, records_by_rank: dict[int, list[Record]]
    ) -> None:
        """Find the cause, and set the moment at which all ranks act: when every rank has read it."""
        divergence = find_divergence(
            records_by_rank, self._ctx.mesh, check.step, self._agreed_at
        )
        assert divergence is not None, (
            "fingerprints that differ belong to records that differ"
        )
        current_moment = self._shared_moment
        passes_per_update = -(
            -current_moment // max(1, self._replicas.clock.num_updates)
        )
        answer = _Answer(
            divergence,
            current_moment + _UPDATES_UNTIL_HEARD * max(1, passes_per_update),
        )
        self._store.set_answer(check.number, msgspec.json.encode(answer).decode())

    @property
    def _shared_moment(self) -> int:
        """Number of backward passes, in which ranks stay in step, or of updates in a script without `backward()`."""
        clock = self._replicas.clock
        return clock.num_passes or clock.num_updates

    # -- one check --------------------------------------------------------------------------------------------------
    def _begin_check(self, update_number: int) -> None:
        """Compute the fingerprints, and start their copy to the host."""
        entries = list(self._replicas.compared_values())
        tensors = [tensor for _, tensor in entries if tensor is not None]
        device = self._ctx.device
        # viewing bits as integers would compile a separate program there
        if kind_of(device).lazy:
            tensors = [tensor.cpu() for tensor in tensors]
            device = torch.device("cpu")
        fingerprints = self._fingerprints.compute_all(tensors, device)
        copied_event = None
        if fingerprints.device.type != "cpu":
            fingerprints = fingerprints.to("cpu", non_blocking=True)
            copied_event = torch.Event(device)
            copied_event.record()
        self._pending_checks.append(
            _Check(
                self._num_checks,
                update_number,
                [entry for entry, _ in entries],
                fingerprints,
                copied_event,
            )
        )
        self._num_checks += 1

    def _post_sums(self, check: _Check) -> None:
        """Post one number per set of axes to rank 0."""
        if check.ready is not None:
            check.ready.synchronize()
        self._store.post_sums(
            check.number,
            [record for record in _make_records(check) if record.kind not in EVIDENCE],
        )

    def _act_on(self, divergence: Divergence) -> None:
        # checks taken in the meantime would report the same again
        self._pending_checks.clear()
        self._is_over = True
        if self._settings.reaction == "stop":
            message = divergence.describe_report(
                "every rank stops here; trust.divergence=report would continue"
            )
            raise DivergenceError(
                message,
                divergence.cause,
                divergence.step,
                divergence.differences[0].name,
                divergence.odd,
            )
        if self._ctx.is_main:
            warning_text = divergence.describe_report(
                "training continues, and the ranks are not compared any more"
            )
            warnings.warn(warning_text, HastenWarning, stacklevel=2)


# called for every tensor in every check, with few different sets of axes
@lru_cache(maxsize=64)
def _sorted_axes(axes: frozenset[Axis]) -> tuple[Axis, ...]:
    return tuple(sorted(axes))


def _make_records(check: _Check) -> list[Record]:
    """Return this rank's records, by name."""
    fingerprint_values = iter(check.values.tolist())
    return [
        Record(
            entry.kind,
            entry.name,
            _sorted_axes(entry.axes),
            # multiplied by a number derived from the name, so that swapped values change the sum
            (
                (next(fingerprint_values) if entry.has_tensor else 0)
                * (entry.digest | 1)
                + entry.digest
            )
            & _MASK,
            entry.value_text,
        )
        for entry in check.entries
    ]
