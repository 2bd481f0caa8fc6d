"""Watch over losses and gradients that are NaN, inf or far too large, before or shortly after they do harm.

With "report" each rank checks its losses some updates later, so that it never waits for the device. With "stop" and
"skip" all ranks check losses and gradients before each update and decide together.
"""

from __future__ import annotations

import math
import warnings
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal
from weakref import ref

import torch
from torch import Tensor, nn

from hasten.data.loader import Loader
from hasten.data.position import Position
from hasten.errors import HastenWarning, NumbersError
from hasten.modules.names import is_dtensor, named_parameters, stage_part
from hasten.optim.clock import StepClock
from hasten.optim.loader_progress import LoaderCursor
from hasten.optim.run_part import Objects, RunPart
from hasten.optim.window import Holder
from hasten.prepare_args import PreparedObjects
from hasten.runtime.context import ProcessContext
from hasten.runtime.nodelist import ranks_in_words
from hasten.trust.numbers.first_module import LastCalls, first_bad_module
from hasten.trust.numbers.late_losses import LateLosses, Update, read_losses

_NUM_RECENT_LOSSES: Final = 64
_FEWEST_LOSSES: Final = 16
"""Number of losses required before one can be called a spike."""
_MOST_SHOWN: Final = 16
_MOST_COLLECTED_LOSSES: Final = 4096
_FINE = 0
_GRADIENT = 1
_LOSS = 2
"""Severity of a rank's numbers. A bad loss makes the averaged gradients of all ranks bad, so it is the highest."""
_WHY: Final = (
    "the update would make weights nan on every rank, and later steps cannot recover. Check these samples; otherwise lower the learning "
    "rate, clip gradients (clip_grad_norm_), or guard the division, logarithm or square root in that module."
)


@dataclass(frozen=True, slots=True)
class NumbersSettings:
    """Reaction to a number that is not finite, and the threshold of a loss spike."""

    reaction: Literal["report", "stop", "skip"] = "report"
    spike: float | None = None
    """Factor over the median of recent losses above which a loss is a spike; None to disable."""
    runs_together: bool = False
    """True if a forward needs every rank, because parameters are sharded."""
    scaled: bool = False
    """True if losses are scaled; the scaler handles overflow."""
    overwritten: bool = False
    """True if the memory of a loss is reused in the next step."""


Batches = list[tuple[Loader, Position, int]]
"""The batches from which a loss was computed: loader, start of its pass, and number of the batch since then."""


@dataclass(frozen=True, slots=True)
class BadValue:
    """Result of one rank's check of one update."""

    problem: str = ""
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
    ) -> None:
        self._prepared = prepared
        self._unwrap = unwrap
        self._ctx = ctx
        self._clock = clock
        self._settings = settings
        self._last_calls = LastCalls()
        self._losses: LateLosses[Batches] = LateLosses(
            settings.overwritten, odd_only=settings.spike is None
        )
        self._cursor: LoaderCursor | None = None
        self._loader: Callable[[], Loader | None] = lambda: None
        self._recent_losses: deque[float] = deque(maxlen=_NUM_RECENT_LOSSES)
        self._reports_later = settings.reaction == "report"
        if self._reports_later:
            self.unused_events = ("prepared", "before_update")
        # A scaler skips updates that overflow, and raises when it skips too many.
        self._is_quiet = self._reports_later and settings.scaled

    def prepared(self, objects: Objects) -> Objects:
        """Record the calls of prepared models, so that the last one can be repeated."""
        for model in objects:
            if isinstance(model, nn.Module):
                self._last_calls.record_calls(model)
        return objects

    def loss(self, loss: Tensor, weight: float | Tensor | None) -> None:
        """Check or collect a loss before its backward. A loss of weight zero may be NaN, and is ignored."""
        if self._is_quiet:
            return
        if self._reports_later and loss.is_cpu:  # reading it does not wait for a device
            if (
                self._settings.spike is not None
                or loss.numel() != 1
                or not math.isfinite(loss.item())
            ):
                self._read_now(loss, weight)
            return
        watched = self._clock.loaders.watched
        if (
            len(watched) == 1
            and watched[0] is self._cursor
            and (loader := self._loader()) is not None
        ):
            # the loop still iterates over the same loader
            batches = [(loader, *loader.current())]
        else:
            batches = self._current_batches()
        is_copy_due = self._losses.add(
            loss, weight, batches, self._clock.num_updates + 1
        )
        if self._reports_later:
            if is_copy_due and not (
                loss.is_cuda and torch.cuda.is_current_stream_capturing()
            ):
                self._report_losses(self._losses.copy())
        elif (
            len(self._losses.collected) > _MOST_COLLECTED_LOSSES
        ):  # a script with an unprepared optimizer makes no updates here
            self._losses.take_collected()

    def _read_now(self, loss: Tensor, weight: float | Tensor | None) -> None:
        update = Update(
            self._clock.num_updates + 1,
            [(loss.detach(), weight, self._current_batches())],
        )
        update.values = read_losses(update)
        self._report_losses([update])

    def _current_batches(self) -> Batches:
        """Return the batches that the active loaders yielded last."""
        batches: Batches = []
        for cursor in self._clock.loaders.active_cursors():
            for loader in self._prepared.loaders:
                if getattr(loader, "cursor", None) is cursor:
                    batches.append((loader, *loader.current()))
                    self._cursor = cursor
                    self._loader = ref(loader)
        return batches

    def before_update(self, optimizer: Holder) -> bool:
        """Check losses and gradients, and return whether the update must be skipped. Ranks: every rank.

        Raises: NumbersError on every rank when a number of any rank is not finite and the setting is "stop".
        """
        return self._check_update(
            self._losses.take_collected(), self._clock.num_updates + 1, optimizer
        )

    def end(self) -> None:
        """Check the losses that have not been checked yet."""
        if self._settings.reaction == "report":
            self._report_losses(self._losses.read_all())

    # -- reports of one rank, some updates later --------------------------------------------------------------------
    def _report_losses(self, updates: Sequence[Update[Batches]]) -> None:
        for update in updates:
            if self._is_quiet or not (problem := self._describe_problem(update.values)):
                continue
            self._is_quiet = True
            text = "\n".join(
                [
                    f"{problem} in update {update.step} on rank {self._ctx.rank}",
                    *self._describe_batches(update).lines,
                    f"  why:  {_WHY}",
                    "  now:  training continues, and this rank reports no further losses; trust.numbers=stop would stop before the update and "
                    "name the module, trust.numbers=skip would skip the update",
                ]
            )
            warnings.warn(text, HastenWarning, stacklevel=2)

    # -- checks of all ranks, before the update ---------------------------------------------------------------------
    def _check_update(
        self, update: Update[Batches], step: int, optimizer: Holder
    ) -> bool:
        if update.losses:
            update.values = read_losses(update)
        problem = self._describe_problem(update.values)
        severity = _LOSS if problem else _FINE
        if (
            not problem
            and not optimizer.scaled
            and optimizer.readable
            and not _has_finite_gradients(optimizer.parameters)
        ):
            problem = "a gradient is nan or inf"
            severity = _GRADIENT
        worst_severity = self._largest_severity(severity)
        if worst_severity == _FINE:
            self._last_calls.clear()
            return False
        if (
            severity < worst_severity
            # averaged with the gradients of a rank whose loss is bad: not caused by this rank
        ):
            problem = ""
        bad_value = self._find_problem(update, problem, optimizer)
        self._last_calls.clear()
        findings_by_rank = self._ctx.world.all_gather_object(
            (bad_value.problem, bad_value.samples, bad_value.lines)
        )
        findings = {}
        for rank, fields in enumerate(findings_by_rank):
            findings[rank] = BadValue(*fields)
        self._react_to_findings(step, findings, optimizer.scaled)
        return not optimizer.scaled

    def _largest_severity(self, severity: int) -> int:
        """Return the highest level of all ranks."""
        world = self._ctx.world
        if world.size == 1:
            return severity
        return int(
            world.all_reduce(torch.tensor([severity], dtype=torch.int32), "max").item()
        )

    def _react_to_findings(
        self, step: int, findings: Mapping[int, BadValue], scaled: bool
    ) -> None:
        if self._settings.reaction == "stop":
            consequence = "every rank stops, before the update; trust.numbers=skip would skip the update and continue"
            raise _make_error(step, findings, consequence)
        if scaled:
            reaction = "the scaler skips the update"
        else:
            reaction = "the update is skipped on every rank"
        self._warn_on_main(
            _render_findings(
                step, findings, f"{reaction}; optimizer and scheduler are unchanged"
            )
        )

    def _warn_on_main(self, text: str) -> None:
        if self._ctx.is_main:
            warnings.warn(text, HastenWarning, stacklevel=2)

    def _find_problem(
        self, update: Update[Batches], problem: str, optimizer: Holder
    ) -> BadValue:
        """Return this rank's finding. If a forward needs every rank, all ranks repeat theirs."""
        report_lines: list[str] = []
        if problem or self._settings.runs_together:
            for call in self._last_calls.latest_calls():
                plain_model = self._unwrap(call.model)
                if stage_part(plain_model) is None:
                    report_lines.append(
                        f"  first module whose output is not finite: {first_bad_module(call, plain_model)}"
                    )
        if not problem:
            return BadValue()
        parameter_names = []
        if not optimizer.scaled and optimizer.readable:
            parameter_names = self._name_bad_gradients(optimizer)
        if parameter_names:
            ellipsis = " …" if len(parameter_names) > _MOST_SHOWN else ""
            report_lines.append(
                f"  gradients that are not finite: {', '.join(parameter_names[:_MOST_SHOWN])}{ellipsis}"
            )
        batch_description = self._describe_batches(update)
        return BadValue(
            problem,
            batch_description.samples,
            [*batch_description.lines, *report_lines],
        )

    def _name_bad_gradients(self, optimizer: Holder) -> list[str]:
        parameter_ids = set(map(id, optimizer.parameters))
        bad_names = []
        for model in self._prepared.models:
            for name, parameter in named_parameters(model):
                is_optimized = id(parameter) in parameter_ids
                if is_optimized and not _has_finite_gradients([parameter]):
                    bad_names.append(name)
        return bad_names

    # -- losses -----------------------------------------------------------------------------------------------------
    def _describe_problem(self, loss_values: list[float]) -> str:
        """Return a description of the problem with these losses; empty if there is none."""
        for loss_value in loss_values:
            if not math.isfinite(loss_value):
                return f"the loss is {loss_value}"
        spike = self._settings.spike
        if spike is not None:
            if len(self._recent_losses) >= _FEWEST_LOSSES:
                median = _find_median(self._recent_losses)
                for loss_value in loss_values:
                    if loss_value > spike * median > 0:
                        return f"the loss is {loss_value:.6g}, {loss_value / median:.3g} times the median of the last {len(self._recent_losses)}"
            self._recent_losses.extend(loss_values)
        return ""

    def _describe_batches(self, update: Update[Batches]) -> BadValue:
        """Return the batches of this update."""
        loss_values = update.values
        report_lines: list[str] = []
        samples: list[int] = []
        bad_losses = []
        for batch_number, loss_value in enumerate(loss_values):
            if not math.isfinite(loss_value):
                bad_losses.append(batch_number)
        for index in bad_losses or range(len(loss_values)):
            for loader, start, steps in update.losses[index][2]:
                sample_indices = loader.samples(start, steps)
                batch_words = f"  loss {loss_values[index]:.6g}: epoch {start.epoch}, batch {steps} of this pass"
                if sample_indices is None:
                    report_lines.append(
                        f"{batch_words}, of a stream or sampler whose order is unknown"
                    )
                else:
                    samples += sample_indices
                    remaining_words = ""
                    if len(sample_indices) > _MOST_SHOWN:
                        remaining_words = (
                            f" and {len(sample_indices) - _MOST_SHOWN} more"
                        )
                    report_lines.append(
                        f"{batch_words}, dataset indices {', '.join(map(str, sample_indices[:_MOST_SHOWN]))}{remaining_words}"
                    )
        return BadValue("", samples, report_lines)


def _render_findings(
    step: int, findings: Mapping[int, BadValue], consequence: str
) -> str:
    """Return the report: the findings by rank, and the consequence."""
    ranks = tuple(rank for rank, bad_value in findings.items() if bad_value.problem)
    problems = dict.fromkeys(findings[rank].problem for rank in ranks)
    report_lines = [
        f"{' and '.join(problems)} in update {step} on {ranks_in_words(ranks)}"
    ]
    for rank in ranks[:_MOST_SHOWN]:
        report_lines += [
            f"  rank {rank}:",
            *(f"  {line}" for line in findings[rank].lines),
        ]
    return "\n".join([*report_lines, f"  why:  {_WHY}", f"  now:  {consequence}"])


def _make_error(
    step: int, findings: Mapping[int, BadValue], consequence: str
) -> NumbersError:
    ranks = tuple(rank for rank, bad_value in findings.items() if bad_value.problem)
    return NumbersError(
        _render_findings(step, findings, consequence),
        step,
        ranks,
        {rank: findings[rank].samples for rank in ranks},
    )


@torch.no_grad()
def _has_finite_gradients(parameters: Sequence[Tensor]) -> bool:
    """Return whether this rank's shards of the gradients are finite, with a single copy to the host."""
    local_gradients: list[Tensor] = []
    for parameter in parameters:
        if (gradient := parameter.grad) is not None:
            if is_dtensor(gradient):
                local_gradient_or_sparse = gradient.to_local()
            else:
                local_gradient_or_sparse = gradient
            if local_gradient_or_sparse.is_sparse:
                local_gradient_or_sparse = local_gradient_or_sparse.coalesce().values()
            local_gradients.append(local_gradient_or_sparse)
    norms = []
    for local_gradient in local_gradients:
        if local_gradient.numel():
            norms.append(torch.linalg.vector_norm(local_gradient, math.inf))
    if not norms:
        return True
    device = norms[0].device
    host_norms = [norm.to(device, torch.float32) for norm in norms]
    return math.isfinite(float(torch.stack(host_norms).sum()))


def _find_median(loss_values: Collection[float]) -> float:
    sorted_values = sorted(loss_values)
    middle = len(sorted_values) // 2
    if len(sorted_values) % 2:
        return sorted_values[middle]
    return (sorted_values[middle - 1] + sorted_values[middle]) / 2
