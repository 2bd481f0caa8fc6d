"""Preparation of models and optimizers by the strategy, then of schedulers and loaders."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import replace
from operator import attrgetter
from typing import Any, Final

import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from hasten.config.root import Config
from hasten.data.loader import Loader
from hasten.errors import HastenWarning, PrepareError, StepError
from hasten.optim.clock import StepClock
from hasten.optim.optimizer import PreparedOptimizer
from hasten.optim.run_part import Objects
from hasten.optim.scheduler import (
    LoopLength,
    PreparedScheduler,
    explain_wrong_length,
)
from hasten.precision.base import Precision
from hasten.prepare_args import Item, PrepareArguments, PreparedObjects, kind_of
from hasten.runtime.context import ProcessContext
from hasten.runtime.logs import get_logger
from hasten.runtime.mesh_plan import BATCH
from hasten.runtime.seeding import checked_rng_types
from hasten.strategies.base import Strategy
from hasten.strategies.choose import chooses_speed, compiles_models, offload_of

log = get_logger(__name__)


_FUSED_KINDS: Final = (Adam, AdamW, SGD)
"""Optimizers whose fused form updates as the plain one does, except for rounding."""


def fused_refusal(optimizer: Optimizer) -> str:
    """Return the reason why an optimizer cannot be made fused; empty when it can, or is already."""
    if type(optimizer) not in _FUSED_KINDS:
        return f"torch has no fused {type(optimizer).__name__}"
    for group in optimizer.param_groups:
        if group.get("fused"):
            continue
        if group.get("fused") is False:
            return "fused=False was given"
        if group.get("foreach") or group.get("differentiable"):
            return f"{'foreach' if group.get('foreach') else 'differentiable'}=True was given"
        unfit_parameter = next(
            (
                parameter
                for parameter in group["params"]
                if parameter.device.type != "cuda" or not parameter.is_floating_point()
            ),
            None,
        )
        if unfit_parameter is not None:
            return f"it updates parameters on {unfit_parameter.device.type} as {unfit_parameter.dtype}"
    return ""


def is_fused(optimizer: Optimizer) -> bool:
    """Return True if every group of an optimizer is updated by a fused kernel."""
    return all(group.get("fused") for group in optimizer.param_groups)


def _make_fused(optimizer: Optimizer, device: torch.device) -> str:
    """Switch an optimizer to its fused implementation where torch has one; return what was done, and why."""
    name = type(optimizer).__name__
    if device.type != "cuda":
        return f"{name} stays as it is: fused kernels gain on CUDA, this process trains on {device.type}"
    if refusal := fused_refusal(optimizer):
        return f"{name} stays as it is: {refusal}"
    for group in optimizer.param_groups:
        group["fused"], group["foreach"] = True, False
        for parameter in group["params"]:
            step = optimizer.state.get(parameter, {}).get("step")
            # the kernel reads it on the device
            if isinstance(step, torch.Tensor) and step.device != parameter.device:
                optimizer.state[parameter]["step"] = step.to(
                    parameter.device, torch.float32
                )
    return (
        f"{name} is fused: one kernel instead of several for each parameter, equal except for rounding; "
        "performance={'fused': False} turns it off"
    )


class Preparer:
    """Converter of the user's objects into prepared ones."""

    def __init__(
        self,
        config: Config,
        ctx: ProcessContext,
        strategy: Strategy,
        precision: Precision,
        clock: StepClock,
    ) -> None:
        self._ctx = ctx
        self._precision = precision
        self._clock = clock
        self.done = PreparedObjects()
        self._before_loaders: list[PreparedScheduler] = []
        """Schedulers prepared before the first loader, and not yet compared with a loader."""
        self.right_lengths = set[int]()
        """Lengths of schedules that are right: results of `num_updates`, and the length of a Trainer's training."""
        self.on_call: Callable[[nn.Module], None] | None = None
        """Called with each prepared model, to add hooks to its calls."""
        self._rng_types = frozenset[str]()
        if config.rng_types:
            self._rng_types = checked_rng_types(config.rng_types, ctx.device)
        self.reconfigure(config, strategy)

    def reconfigure(self, config: Config, strategy: Strategy) -> None:
        """Use other settings for later calls of `prepare()`."""
        self._config = config
        self._strategy = strategy
        self._offload = offload_of(config)
        self._fuses = config.performance.fused and chooses_speed(config.performance)

    def prepare(
        self,
        objects: Objects,
        placement: Sequence[bool] | None = None,
        train: bool = True,
    ) -> Objects:
        """Return the prepared objects, in call order. Ranks: every rank, with the same kinds in the same order.

        Raises: PrepareError naming an object of an unsupported kind.
        """
        if placement is None:
            placement = [self._config.device_placement] * len(objects)
        elif len(placement) != len(objects):
            raise PrepareError(
                f"device_placement has {len(placement)} entries for {len(objects)} objects; give one for each."
            )
        arguments = PrepareArguments()
        for value, may_move in zip(objects, placement, strict=True):
            kind = "nothing" if self.done.holds(value) else kind_of(value)
            arguments.items.append(Item(kind, value, may_move))
        if "bitsandbytes" in sys.modules:
            # only for quantized models
            from hasten.modules.quantized import restore_states_on_load

            for item in arguments.of("model"):
                restore_states_on_load(item.value)
        # Models are transformed, in the order of their strategy's transforms, and optimizers get their new parameters.
        arguments.earlier = list(map(self._strategy.unwrap, self.done.models))
        self._strategy.prepare(arguments, self._ctx, self._precision, train)
        for item in arguments.of("model"):
            self.done.models.append(item.value)
            if self.on_call is not None:
                self.on_call(item.value)
        # Optimizers follow the accumulation window, schedulers their optimizers, and loaders read this rank's share.
        for item in arguments.of("optimizer"):
            item.value = self._prepare_optimizer(item.value)
        self._note_unowned()
        for item in arguments.of("scheduler"):
            item.value = self._prepare_scheduler(item.value)
        for item in arguments.of("loader"):
            item.value = self.loader(item.value, item.place)
        prepared: Objects = tuple(map(attrgetter("value"), arguments.items))
        for replace_objects in self._clock.parts.prepared:
            prepared = replace_objects(prepared)
        return prepared

    def _prepare_optimizer(self, optimizer: Optimizer) -> PreparedOptimizer:
        if self._fuses and not is_fused(optimizer):
            message = _make_fused(optimizer, self._ctx.device)
            if self._ctx.is_main:
                log.info("performance: %s", message)
        if self._offload is not None:
            models: list[nn.Module] = []
            # hooks on compiled blocks would be compiled with them; less memory is then used for state on its way
            if not compiles_models(self._config):
                models = list(map(self._strategy.unwrap, self.done.models))
            self._offload.stream_updates(
                optimizer, self._config, self._ctx, lambda: self._clock.boundary, models
            )
        prepared = PreparedOptimizer(optimizer, self._clock, self._precision)
        self.done.optimizers.append(prepared)
        return prepared

    def _note_unowned(self) -> None:
        """Tell the clock whether a trained parameter is in no optimizer."""
        owned_ids = set[int]()
        for optimizer in self.done.optimizers:
            owned_ids.update(map(id, optimizer.parameters))
        self._clock.has_unowned = False
        for model in self.done.models if owned_ids else ():
            for parameter in model.parameters():
                if parameter.requires_grad and id(parameter) not in owned_ids:
                    self._clock.has_unowned = True

    # Any: schedulers share no base class
    def _prepare_scheduler(self, scheduler: Any) -> PreparedScheduler:
        scheduled_optimizer = getattr(scheduler, "optimizer", None)
        for owner in self.done.optimizers:
            if scheduled_optimizer in (owner, owner.optimizer):
                break
        else:
            raise PrepareError(
                f"{type(scheduler).__name__} schedules an optimizer that is not prepared, so it could not follow its "
                "updates; pass the optimizer to prepare() too, before or together with the scheduler."
            )
        prepared = PreparedScheduler(
            scheduler, owner, self._config.step_scheduler_with_optimizer
        )
        self.done.schedulers.append(prepared)
        if not self.done.loaders:
            self._before_loaders.append(prepared)
        elif prepared.length is not None:
            num_batches = self.done.loaders[0].parts.source.steps()
            if num_batches is not None:
                self._warn_of_length(prepared, num_batches, num_batches)
        return prepared

    def prepare_loader(
        self,
        loader: Any,
        moves_batches: bool | None = None,
        already_sharded: bool | None = None,
    ) -> Any:
        """Prepare one loader."""
        if self.done.holds(loader):
            return loader
        if moves_batches is None:
            moves_batches = self._config.device_placement
        prepared: Objects = (None,)
        if loader is not None:
            prepared = (self.loader(loader, moves_batches, already_sharded),)
        for replace_objects in self._clock.parts.prepared:
            prepared = replace_objects(prepared)
        return prepared[0]

    def join(
        self, joinables: Sequence[Any], even_batches: bool | None
    ) -> AbstractContextManager[None]:
        """Context manager in which ranks may run out of batches at different times."""
        for run_part in self._clock.parts.members:
            if run_part.needs_even_batches:
                raise StepError(
                    f"join_uneven_inputs() cannot be combined with {run_part.needs_even_batches}"
                )
        return self._join_models(joinables, even_batches)

    @contextmanager
    def _join_models(
        self, joinables: Sequence[Any], even_batches: bool | None
    ) -> Iterator[None]:
        with ExitStack() as stack:
            if even_batches is not None:
                for loader in self.done.loaders:
                    stack.enter_context(loader.even(even_batches))
            stack.enter_context(
                self._strategy.join(
                    [
                        joinable
                        for joinable in joinables
                        if isinstance(joinable, nn.Module)
                    ]
                )
            )
            trained_separately, self._clock.trains_separately = (
                self._clock.trains_separately,
                True,
            )
            stack.callback(
                setattr, self._clock, "trains_separately", trained_separately
            )
            yield

    def loader(
        self,
        loader: Any,
        moves_batches: bool,
        already_sharded: bool | None = None,
    ) -> Any:
        """Prepare a loader, and warn about schedules that were made for its length before that. Ranks: every rank."""
        from hasten.data.build import prepare_loader  # on first use

        wraps = () if self.done.loaders else self._clock.parts.source
        config = self._config.dataloader
        prepared: Loader = prepare_loader(
            loader,
            ctx=self._ctx,
            config=config.replace(prefetch=0) if wraps else config,
            clock=self._clock,
            device=self._ctx.device if moves_batches else None,
            seed=torch.initial_seed(),
            rng_types=self._rng_types,
            transfer=self._strategy.caps.transfer,
            already_sharded=already_sharded,
        )
        for wrap in wraps:
            prepared.parts = replace(prepared.parts, source=wrap(prepared.parts.source))
        self.done.loaders.append(prepared)
        schedulers = self._before_loaders
        self._before_loaders = []
        for scheduler in schedulers:
            # an iterable dataset may have no length
            with suppress(TypeError):
                if scheduler.length is not None:
                    self._warn_of_length(scheduler, len(loader), len(prepared))
        return prepared

    def num_updates(self, loader: Loader, epochs: int) -> int:
        """Return the number of updates in so many epochs of a prepared loader."""
        num_updates = self._length_of(len(loader), len(loader)).num_updates(epochs)
        self.right_lengths.add(num_updates)
        return num_updates

    def _length_of(self, num_batches: int, num_prepared: int) -> LoopLength:
        every = self._clock.every if self._config.step_scheduler_with_optimizer else 1
        return LoopLength(
            num_batches,
            num_prepared,
            self._ctx.groups(*BATCH).size,
            every,
            self._clock.sync_with_dataloader,
        )

    def _warn_of_length(
        self, scheduler: PreparedScheduler, num_batches: int, num_prepared: int
    ) -> None:
        """Warn if a schedule is as long as a loader of so many batches before and after it was prepared."""
        if not self._ctx.is_main or scheduler.length in self.right_lengths:
            return
        loop_length = self._length_of(num_batches, num_prepared)
        if length_warning := explain_wrong_length(scheduler.scheduler, loop_length):
            warnings.warn(length_warning, HastenWarning, stacklevel=user_stacklevel())


def user_stacklevel() -> int:
    """Return the stacklevel of a warning, given where this is called, that names the user's line."""
    level = 1
    frame = sys._getframe(1)
    while (
        frame.f_back is not None
        and frame.f_globals.get("__name__", "").partition(".")[0] == "hasten"
    ):
        level = level + 1
        frame = frame.f_back
    return level
