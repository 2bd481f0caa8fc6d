"""Watch over losses and gradients that are NaN, inf or far too large, before or shortly after they do harm.

With "report" each rank checks its losses some updates later, so that it never waits for the device. With "stop", "skip" and
"rollback" all ranks check losses and gradients before each update and decide together.
"""

from __future__ import annotations

import math
import warnings
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn

from hasten.data.loader import Loader
from hasten.data.position import BatchRange, Position
from hasten.errors import HastenWarning, NumbersError
from hasten.modules.names import is_dtensor, named_parameters, stage_part
from hasten.optim.clock import StepClock
from hasten.optim.loader_progress import ActiveLoaders, LoaderCursor
from hasten.optim.run_part import Objects, RunPart
from hasten.optim.window import Holder
from hasten.prepare_args import PreparedObjects
from hasten.runtime.context import ProcessContext
from hasten.runtime.nodelist import ranks_in_words
from hasten.trust.numbers.first_module import LastCalls, first_bad_module
from hasten.trust.numbers.late_losses import LateLosses, Update, read


class Rollback(RunPart):
    """Rollback of a run to its latest checkpoint, a limited number of times. Ranks: every rank does the same."""

    def __init__(
        self,
        newest: Callable[[], str | None],
        load: Callable[[str], object],
        active_loaders: ActiveLoaders,
        limit: int,
        is_main: bool = True,
    ) -> None:
        self._is_main = is_main
        self._newest = newest
        self._load = load
        self._active_loaders = active_loaders
        self.limit = limit
        self.times = 0
        """Number of rollbacks so far, including a pending one."""
        self.target: str | None = None
        """Checkpoint of a pending rollback, from the decision until it is loaded."""
        self._left_out: WeakKeyDictionary[Loader, set[BatchRange]] = WeakKeyDictionary()
        self._led: tuple[LoaderCursor, ...] = ()

    def refusal(self, knows_batches: bool) -> str:
        """Return the reason why a rollback is not possible; empty if it is. Ranks: every rank."""
        if not knows_batches:
            return "trust.numbers=rollback needs batches from a prepared loader; prepare() the loader, or use trust.numbers=skip"
        if self.times >= self.limit:
            return (
                f"the run was already rolled back {self.times} times (trust.numbers_rollbacks={self.limit}), so single batches are probably "
                "not the cause"
            )
        if self._newest() is None:
            return (
                "this run has neither saved nor loaded a checkpoint to roll back to; call save_state() before the first step and "
                "regularly afterwards"
            )
        return ""

    def decide(self, batches: Iterable[tuple[Loader, Position, int]]) -> str:
        """Schedule a rollback before the next batch that omits `batches`; return the checkpoint. Ranks: every rank."""
        self.target = self._newest()
        assert self.target is not None, "refusal() found a checkpoint"
        led = []
        for loader, start, number in batches:
            self._left_out.setdefault(loader, set()).add(loader.batch_range(start, number))
            led.append(loader.cursor)
        self._led = tuple(led)
        self.times += 1
        return self.target

    def batch(self, cursor: LoaderCursor) -> None:
        """Perform a pending rollback before the next batch of a loader whose batches are left out."""
        if self.target is not None and any(cursor is one for one in self._led):
            self.now()

    def before_save(self) -> str | None:
        """Refuse a save while a rollback is pending; return the checkpoint that will be loaded."""
        if self.target is not None and self._is_main:
            warnings.warn(
                f"save_state() saved nothing: the run is about to go back to {self.target}, and what it holds now, "
                "after a bad batch, would become the newest checkpoint.",
                HastenWarning,
                stacklevel=4,
            )
        return self.target

    def now(self) -> bool:
        """Perform a pending rollback; return whether there was one. Ranks: every rank."""
        target, self.target = self.target, None
        if target is None:
            return False
        self._led = ()
        self._load(target)
        for loader, batches in self._left_out.items():
            loader.leave_out(batches)  # the checkpoint only has the batches excluded before it was saved
        self._active_loaders.num_rollbacks += 1
        return True


_RECENT: Final = 64
_ENOUGH: Final = 16
"""Number of losses required before one can be called a spike."""
_SHOWN: Final = 16
_MOST: Final = 4096
_FINE, _GRADIENT, _LOSS = 0, 1, 2
"""Severity of a rank's numbers. A bad loss makes the averaged gradients of all ranks bad, so it is the highest."""
_WHY: Final = (
    "the update would make weights nan on every rank, and later steps cannot recover. Check these samples; otherwise lower the learning "
    "rate, clip gradients (clip_grad_norm_), or guard the division, logarithm or square root in that module."
)


@dataclass(frozen=True, slots=True)
class NumbersSettings:
    """Reaction to a number that is not finite, and the threshold of a loss spike."""

    then: Literal["report", "stop", "skip", "rollback"] = "report"
    spike: float | None = None
    """Factor over the median of recent losses above which a loss is a spike; None to disable."""
    runs_together: bool = False
    """True if a forward needs every rank, because parameters are sharded."""
    rollbacks: int = 0
    """Maximum number of rollbacks to a checkpoint."""
    scaled: bool = False
    """True if losses are scaled; the scaler handles overflow."""
    overwritten: bool = False
    """True if the memory of a loss is reused in the next step."""


Batches = list[tuple[Loader, Position, int]]
"""The batches from which a loss was computed: loader, start of its pass, and number of the batch since then."""


@dataclass(frozen=True, slots=True)
class BadValue:
    """Result of one rank's check of one update."""

    what: str = ""
    """Description of the problem; empty if the rank's numbers are fine."""
    samples: list[int] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)


class NumbersWatch(RunPart):
    """Watch over the losses and gradients of one rank. Called by the training thread."""

    def __init__(
        self,
        prepared: PreparedObjects,
        unwrap: Callable[[nn.Module], nn.Module],
        ctx: ProcessContext,
        clock: StepClock,
        settings: NumbersSettings,
        rollback: Rollback | None = None,
        newest: Callable[[], str | None] = lambda: None,
    ) -> None:
        self._prepared = prepared
        self._unwrap = unwrap
        self._ctx = ctx
        self._clock = clock
        self._settings = settings
        self.rollback = rollback
        self._newest = newest
        self._calls = LastCalls()
        self._losses: LateLosses[Batches] = LateLosses(settings.overwritten, odd_only=settings.spike is None)
        self._cursor: LoaderCursor | None = None
        self._loader: Callable[[], Loader | None] = lambda: None
        self._recent: deque[float] = deque(maxlen=_RECENT)
        self._later = settings.then == "report"
        if self._later:
            self.unused_events = ("prepared", "before_update")
        # A scaler skips updates that overflow, and raises when it skips too many.
        self._quiet = self._later and settings.scaled

    def prepared(self, objects: Objects) -> Objects:
        """Record the calls of prepared models, so that the last one can be repeated."""
        for model in objects:
            if isinstance(model, nn.Module):
                self._calls.follow(model)
        return objects

    def loss(self, loss: Tensor, weight: float | Tensor | None) -> None:
        """Check or collect a loss before its backward. A loss of weight zero may be NaN, and is ignored."""
        if self._quiet:
            return
        if self._later and loss.is_cpu:  # reading it does not wait for a device
            if self._settings.spike is not None or loss.numel() != 1 or not math.isfinite(loss.item()):
                self._read_now(loss, weight)
            return
        watched = self._clock.loaders.watched
        if len(watched) == 1 and watched[0] is self._cursor and (loader := self._loader()) is not None:
            batches = [(loader, *loader.current())]  # the loop still iterates over the same loader
        else:
            batches = self._batches()
        due = self._losses.add(loss, weight, batches, self._clock.num_updates + 1)
        if self._later:
            if due and not (loss.is_cuda and torch.cuda.is_current_stream_capturing()):
                self._report(self._losses.copy())
        elif len(self._losses.held) > _MOST:  # a script with an unprepared optimizer makes no updates here
            self._losses.take()

    def _read_now(self, loss: Tensor, weight: float | Tensor | None) -> None:
        update = Update(self._clock.num_updates + 1, [(loss.detach(), weight, self._batches())])
        update.values = read(update)
        self._report([update])

    def _batches(self) -> Batches:
        """Return the batches that the active loaders yielded last."""
        found: Batches = []
        for cursor in self._clock.loaders.active():
            for one in self._prepared.loaders:
                if getattr(one, "cursor", None) is cursor:
                    found.append((one, *one.current()))
                    self._cursor, self._loader = cursor, ref(one)
        return found

    def before_update(self, optimizer: Holder) -> bool:
        """Check losses and gradients, and return whether the update must be skipped. Ranks: every rank.

        Raises: NumbersError on every rank when a number of any rank is not finite and the setting is "stop", or a rollback is not possible.
        """
        if self.rollback is not None and self.rollback.target is not None:  # the update will be undone
            self._losses.take()
            return not optimizer.scaled
        return self._look(self._losses.take(), self._clock.num_updates + 1, optimizer)

    def end(self) -> None:
        """Check the losses that have not been checked yet."""
        if self._settings.then == "report":
            self._report(self._losses.rest())
        elif self.rollback is not None and self.rollback.target is not None and self._ctx.is_main:
            warnings.warn(
                f"the training ended before it was rolled back to {self.rollback.target}, because the loop read no further batch. The "
                "bad update was skipped; nothing else was undone. Call accelerator.roll_back() if the loop may end after any update.",
                HastenWarning,
                stacklevel=3,
            )

    # -- reports of one rank, some updates later --------------------------------------------------------------------
    def _report(self, updates: Sequence[Update[Batches]]) -> None:
        for update in updates:
            if self._quiet or not (what := self._judge(update.values)):
                continue
            self._quiet = True
            text = "\n".join(
                [
                    f"{what} in update {update.step} on rank {self._ctx.rank}",
                    *self._describe(update).lines,
                    f"  why:  {_WHY}",
                    "  now:  training continues, and this rank reports no further losses; trust.numbers=stop would stop before the update and "
                    "name the module, trust.numbers=skip would skip the update",
                ]
            )
            warnings.warn(text, HastenWarning, stacklevel=2)

    # -- checks of all ranks, before the update ---------------------------------------------------------------------
    def _look(self, seen: Update[Batches], step: int, optimizer: Holder) -> bool:
        if seen.losses:
            seen.values = read(seen)
        what = self._judge(seen.values)
        level = _LOSS if what else _FINE
        if not what and not optimizer.scaled and optimizer.readable and not _finite_gradients(optimizer.parameters):
            what, level = "a gradient is nan or inf", _GRADIENT
        worst = self._worst(level)
        if worst == _FINE:
            self._calls.clear()
            return False
        if level < worst:  # averaged with the gradients of a rank whose loss is bad: not caused by this rank
            what = ""
        finding = self._find(seen, what, optimizer)
        self._calls.clear()
        batches = [one for _, _, found in seen.losses for one in found]
        answers = self._ctx.world.all_gather_object((bool(batches), (finding.what, finding.samples, finding.lines)))
        findings = {rank: BadValue(*one) for rank, (_, one) in enumerate(answers)}
        if self._settings.then == "rollback":
            self._go_back(step, findings, batches, all(known for known, _ in answers))
        else:
            self._act(step, findings, optimizer.scaled)
        return not optimizer.scaled

    def _worst(self, level: int) -> int:
        """Return the highest level of all ranks."""
        world = self._ctx.world
        return (
            level if world.size == 1 else int(world.all_reduce(torch.tensor([level], dtype=torch.int32), "max").item())
        )

    def _act(self, step: int, findings: Mapping[int, BadValue], scaled: bool) -> None:
        if self._settings.then == "stop":
            now = "every rank stops, before the update; trust.numbers=skip would skip the update and continue"
            raise _error(step, findings, now)
        how = "the scaler skips the update" if scaled else "the update is skipped on every rank"
        self._tell(_in_words(step, findings, f"{how}; optimizer and scheduler are unchanged"))

    def _go_back(self, step: int, findings: Mapping[int, BadValue], batches: Batches, known: bool) -> None:
        rollback = self.rollback
        assert rollback is not None, "made with the setting"
        if refusal := rollback.refusal(known):
            raise _error(step, findings, f"every rank stops, before the update: {refusal}")
        place = rollback.decide(batches)
        self._recent.clear()  # the losses of the undone updates will be repeated
        how = f"the run is rolled back to {place} and skips the batches of this update ({rollback.times} of at most {rollback.limit} times)"
        self._tell(_in_words(step, findings, how))

    def _tell(self, text: str) -> None:
        if self._ctx.is_main:
            warnings.warn(text, HastenWarning, stacklevel=2)

    def _find(self, seen: Update[Batches], what: str, optimizer: Holder) -> BadValue:
        """Return this rank's finding. If a forward needs every rank, all ranks repeat theirs."""
        lines: list[str] = []
        if what or self._settings.runs_together:
            for call in self._calls.all():
                inner = self._unwrap(call.model)
                if stage_part(inner) is None:
                    lines.append(f"  first module whose output is not finite: {first_bad_module(call, inner)}")
        if not what:
            return BadValue()
        if not optimizer.scaled and optimizer.readable and (names := self._bad_gradients(optimizer)):
            lines.append(
                f"  gradients that are not finite: {', '.join(names[:_SHOWN])}{' …' if len(names) > _SHOWN else ''}"
            )
        place = self._describe(seen)
        return BadValue(what, place.samples, [*place.lines, *lines])

    def _bad_gradients(self, optimizer: Holder) -> list[str]:
        own = {id(parameter) for parameter in optimizer.parameters}
        return [
            name
            for model in self._prepared.models
            for name, parameter in named_parameters(model)
            if id(parameter) in own and not _finite_gradients([parameter])
        ]

    # -- losses -----------------------------------------------------------------------------------------------------
    def _judge(self, values: list[float]) -> str:
        """Return a description of the problem with these losses; empty if there is none."""
        for value in values:
            if not math.isfinite(value):
                return f"the loss is {value}"
        spike = self._settings.spike
        if spike is not None:
            if len(self._recent) >= _ENOUGH:
                median = _median(self._recent)
                for value in values:
                    if value > spike * median > 0:
                        return f"the loss is {value:.6g}, {value / median:.3g} times the median of the last {len(self._recent)}"
            self._recent.extend(values)
        return ""

    def _describe(self, seen: Update[Batches]) -> BadValue:
        """Return the batches of this update, with the commands to fetch them again."""
        values = seen.values
        lines: list[str] = []
        samples: list[int] = []
        odd = [number for number, value in enumerate(values) if not math.isfinite(value)]
        for index in odd or range(len(values)):
            for loader, start, steps in seen.losses[index][2]:
                indices = loader.samples(start, steps)
                where = f"  loss {values[index]:.6g}: epoch {start.epoch}, batch {steps} of this pass"
                if indices is None:
                    lines.append(f"{where}, of a stream or sampler whose order is unknown")
                else:
                    samples += indices
                    more = f" and {len(indices) - _SHOWN} more" if len(indices) > _SHOWN else ""
                    lines.append(f"{where}, dataset indices {', '.join(map(str, indices[:_SHOWN]))}{more}")
                    if number := loader.number(start, steps):
                        which = f"--rank {self._ctx.rank} --epoch {start.epoch} --batch {number}"
                        lines.append(f"  fetch it again: hasten data show {self._newest() or 'CHECKPOINT'} {which}")
        return BadValue("", samples, lines)


def _in_words(step: int, findings: Mapping[int, BadValue], now: str) -> str:
    """Return the report: the findings by rank, and the consequence."""
    ranks = tuple(rank for rank, one in findings.items() if one.what)
    kinds = dict.fromkeys(one.what for one in findings.values() if one.what)
    lines = [f"{' and '.join(kinds)} in update {step} on {ranks_in_words(ranks)}"]
    for rank in ranks[:_SHOWN]:
        lines += [f"  rank {rank}:", *(f"  {line}" for line in findings[rank].lines)]
    return "\n".join([*lines, f"  why:  {_WHY}", f"  now:  {now}"])


def _error(step: int, findings: Mapping[int, BadValue], now: str) -> NumbersError:
    ranks = tuple(rank for rank, one in findings.items() if one.what)
    return NumbersError(_in_words(step, findings, now), step, ranks, {rank: findings[rank].samples for rank in ranks})


@torch.no_grad()
def _finite_gradients(parameters: Sequence[Tensor]) -> bool:
    """Return whether this rank's shards of the gradients are finite, with a single copy to the host."""
    parts: list[Tensor] = []
    for parameter in parameters:
        if (grad := parameter.grad) is not None:
            local = grad.to_local() if is_dtensor(grad) else grad
            parts.append(local.coalesce().values() if local.is_sparse else local)
    worst = [torch.linalg.vector_norm(part, math.inf) for part in parts if part.numel()]
    if not worst:
        return True
    device = worst[0].device
    return math.isfinite(float(torch.stack([one.to(device, torch.float32) for one in worst]).sum()))


def _median(values: Collection[float]) -> float:
    ordered = sorted(values)
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2
