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
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, Literal

import msgspec
import torch
from torch import Tensor
from torch.distributed import Store

from hasten.errors import DivergenceError, HastenWarning
from hasten.extensions.divergence.divergence import EVIDENCE, Divergence, Record, find
from hasten.extensions.divergence.fingerprint import Fingerprints, FingerprintStore
from hasten.extensions.divergence.replicas import ComparedTensor, Replicas
from hasten.optim.clock import StepClock
from hasten.optim.run_part import RunPart
from hasten.optim.window import Holder
from hasten.prepare_args import PreparedObjects
from hasten.runtime.context import ProcessContext
from hasten.runtime.devices import kind_of
from hasten.runtime.mesh_plan import Axis
from hasten.runtime.store import LOST

log = logging.getLogger(__name__)

_HEARD_AFTER: Final = 4
"""Updates after which every rank has seen an answer: those between two collectives, with a margin."""
_STALE: Final = 200
"""Updates after which a check is abandoned, because a rank never took part in it."""
_LAST_S: Final = 60.0
_LOOK_S: Final = 0.001
_MASK: Final = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class DivergenceCheckSettings:
    """Interval of the comparison, and the reaction to a difference."""

    every: int = 100
    then: Literal["stop", "report"] = "stop"
    ignored: Sequence[str] = ()
    """Patterns of names that are not compared."""


class _Answer(msgspec.Struct, frozen=True):
    """Rank 0's diagnosis, and the moment at which every rank acts on it."""

    found: Divergence
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
        self, replicas: Replicas, ctx: ProcessContext, store: Store, settings: DivergenceCheckSettings
    ) -> None:
        self._replicas = replicas
        self._ctx = ctx
        self._settings = settings
        self._store = FingerprintStore(store, ctx.rank, ctx.mesh)
        self._fingerprints = Fingerprints()
        self._pending: deque[_Check] = deque()
        self._taken = 0
        self._agreed_at: int | None = None

    def after_update(self, optimizer: Holder, applied: bool) -> None:
        """Advance pending checks after an optimizer update, and start a new one when due. Ranks: every rank.

        Raises: DivergenceError on every rank when the check of an earlier update has found a difference.
        """
        step = self._replicas.clock.num_updates
        if self._replicas.clock.apart:
            self._pending.clear()
            return
        if self._pending:
            self._advance(step)
        if step % self._settings.every == 0 or self._taken == 0:
            self._take(step)

    def end(self) -> None:
        """Run a last check and wait for its result. Ranks: every rank, at the end of training."""
        if self._replicas.clock.apart or self._taken == 0:
            return
        self._take(self._replicas.clock.num_updates)
        until = time.monotonic() + _LAST_S
        while self._pending and time.monotonic() < until:
            self._advance(None)
            time.sleep(_LOOK_S)
        if self._pending:
            log.warning("the last divergence check was skipped: not every rank reached it")

    def _advance(self, step: int | None) -> None:
        """Advance every check as far as possible without waiting; `step` is None at the end of training."""
        try:
            for check in list(self._pending):
                if step is None or step > check.step:
                    self._move(check, step)
        except LOST:  # the process that serves the store has exited, which is reported there
            log.warning("divergence checks stop here: the connection to the job's store is lost")
            self._pending.clear()

    def _move(self, check: _Check, step: int | None) -> None:
        number = check.number
        if check.stage == "taken":
            self._post(check)
            check.stage = "posted"
        if check.stage == "posted" and (agreed := self._store.verdict(number)) is not None:
            if agreed:
                self._agreed_at = check.step
                self._pending.remove(check)
                return
            self._store.show(number, _records(check))
            check.stage = "shown"
        if check.stage == "shown" and self._ctx.is_main and (held := self._store.shown(number)) is not None:
            self._decide(check, held)
            check.stage = "answered"
        if check.stage in ("shown", "answered") and (text := self._store.answer(number)) is not None:
            check.answer = msgspec.json.decode(text, type=_Answer)
            check.stage = "known"
        if check.stage == "known" and check.answer is not None:
            if step is None or self._moment >= check.answer.act_at:
                self._act(check.answer.found)
        elif step is not None and step - check.step > _STALE:
            self._pending.remove(check)

    def _decide(self, check: _Check, held: dict[int, list[Record]]) -> None:
        """Find the cause, and set the moment at which all ranks act: when every rank has read it."""
        found = find(held, self._ctx.mesh, check.step, self._agreed_at)
        assert found is not None, "fingerprints that differ belong to records that differ"
        now = self._moment
        each = -(-now // max(1, self._replicas.clock.num_updates))
        answer = _Answer(found, now + _HEARD_AFTER * max(1, each))
        self._store.set_answer(check.number, msgspec.json.encode(answer).decode())

    @property
    def _moment(self) -> int:
        """Number of backward passes, in which ranks stay in step, or of updates in a script without `backward()`."""
        clock = self._replicas.clock
        return clock.num_passes or clock.num_updates

    # -- one check --------------------------------------------------------------------------------------------------
    def _take(self, step: int) -> None:
        """Compute the fingerprints, and start their copy to the host."""
        held = self._replicas.entries()
        if self._taken == 0 and self._ctx.is_main:
            self._warn_of_unmatched()
        tensors = [tensor for _, tensor in held if tensor is not None]
        device = self._ctx.device
        if kind_of(device).lazy:  # viewing bits as integers would compile a separate program there
            tensors, device = [tensor.cpu() for tensor in tensors], torch.device("cpu")
        found = self._fingerprints.of(tensors, device)
        ready = None
        if found.device.type != "cpu":
            found = found.to("cpu", non_blocking=True)
            ready = torch.Event(device)
            ready.record()
        self._pending.append(_Check(self._taken, step, [entry for entry, _ in held], found, ready))
        self._taken += 1

    def _post(self, check: _Check) -> None:
        """Post one number per set of axes to rank 0."""
        if check.ready is not None:
            check.ready.synchronize()
        self._store.post(check.number, [record for record in _records(check) if record.kind not in EVIDENCE])

    def _act(self, found: Divergence) -> None:
        self._pending.clear()  # checks taken in the meantime would report the same again
        if self._settings.then == "stop" and not found.mild:
            message = found.message("every rank stops here; trust.divergence=report would continue")
            raise DivergenceError(message, found.cause, found.step, found.differences[0].name, found.odd)
        self._replicas.forgiven.update((one.kind, one.name) for one in found.differences)
        if self._ctx.is_main:
            text = found.message("training continues, and these values are no longer compared")
            warnings.warn(text, HastenWarning, stacklevel=2)

    def _warn_of_unmatched(self) -> None:
        unmatched = [pattern for pattern in self._settings.ignored if pattern not in self._replicas.matched]
        if unmatched:
            text = (
                f"trust.divergence_ignore={unmatched[0]!r} matches no parameter or buffer of the prepared models on rank 0, so it has no "
                "effect. Give canonical names such as 'encoder.*.running_mean'."
            )
            warnings.warn(text, HastenWarning, stacklevel=2)


@lru_cache(maxsize=64)  # called for every tensor in every check, with few different sets of axes
def _in_order(axes: frozenset[Axis]) -> tuple[Axis, ...]:
    return tuple(sorted(axes))


def _records(check: _Check) -> list[Record]:
    """Return this rank's records, by name."""
    values = iter(check.values.tolist())
    return [
        Record(
            entry.kind,
            entry.name,
            _in_order(entry.axes),
            # multiplied by a number derived from the name, so that swapped values change the sum
            ((next(values) if entry.has_tensor else 0) * (entry.digest | 1) + entry.digest) & _MASK,
            entry.said,
            entry.statistics,
        )
        for entry in check.entries
    ]


def check_of(
    prepared: PreparedObjects, clock: StepClock, ctx: ProcessContext, store: Store, settings: DivergenceCheckSettings
) -> DivergenceCheck:
    """Return the divergence check of this rank over the prepared objects; ranks that split layers draw equal numbers."""
    shares_random = ctx.mesh.size(Axis.TP) > 1
    return DivergenceCheck(Replicas(prepared, clock, settings.ignored, random=shares_random), ctx, store, settings)
