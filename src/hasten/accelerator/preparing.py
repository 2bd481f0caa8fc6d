"""Preparation of models and optimizers by the strategy, then of schedulers and loaders."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
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
    schedule_length,
)
from hasten.precision.base import Precision
from hasten.prepare_args import Item, PrepareArguments, PreparedObjects
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
        self._config = config
        self._ctx = ctx
        self._strategy = strategy
        self._precision = precision
        self._clock = clock
        self.done = PreparedObjects()
        self._before_loaders: list[Any] = []
        """Schedulers created before the first loader was prepared, and not yet compared with a loader."""
        self.right_lengths = set[int]()
        """Lengths of schedules that are right: results of `num_updates`, and the length of a Trainer's training."""
        self.on_call: Callable[[nn.Module], None] | None = None
        """Called with each prepared model, to add hooks to its calls."""
        if config.rng_types:
            self._rng_types = checked_rng_types(config.rng_types, ctx.device)
        else:
            self._rng_types = frozenset[str]()

    def reconfigure(self, config: Config, strategy: Strategy) -> None:
        """Use other settings for later calls of `prepare()`."""
        self._config, self._strategy = config, strategy

    def prepare(
        self,
        objects: Objects,
        placement: Sequence[bool] | None = None,
        train: bool = True,
    ) -> Objects:
        """Return the prepared objects, in call order. Ranks: every rank, with the same kinds in the same order."""
        if placement is not None and len(placement) != len(objects):
            raise PrepareError(
                f"device_placement has {len(placement)} entries for {len(objects)} objects; give one for each."
            )
        placements = list(placement or [self._config.device_placement] * len(objects))
        prepare_arguments = PrepareArguments.sort(objects, placements)
        for prepare_item in prepare_arguments.items:
            if self.done.holds(prepare_item.value):
                prepare_item.kind = "nothing"
        if "bitsandbytes" in sys.modules:
            # only for quantized models
            from hasten.modules.quantized import restore_states_on_load

            for prepare_item in prepare_arguments.of("model"):
                restore_states_on_load(prepare_item.value)
        prepare_arguments.earlier = [
            self._strategy.unwrap(model) for model in self.done.models
        ]
        # Models are transformed, in the order of their strategy's transforms, and optimizers get their new parameters.
        self._strategy.prepare(prepare_arguments, self._ctx, self._precision, train)
        for prepare_item in prepare_arguments.of("model"):
            self.done.models.append(prepare_item.value)
            if self.on_call is not None:
                self.on_call(prepare_item.value)
        # Optimizers follow the accumulation window, schedulers their optimizers, and loaders read this rank's share.
        for prepare_item in prepare_arguments.of("optimizer"):
            prepare_item.value = self._prepare_optimizer(prepare_item.value)
        self._note_unowned()
        for prepare_item in prepare_arguments.of("scheduler"):
            prepare_item.value = self._prepare_scheduler(prepare_item.value)
        self._prepare_loaders(prepare_arguments.of("loader"))
        return self._replace_prepared(prepare_arguments.in_call_order())

    def _replace_prepared(self, objects: Objects) -> Objects:
        """Return what the parts of the run put in place of prepared objects."""
        for replace_objects in self._clock.parts.prepared:
            objects = replace_objects(objects)
        return objects

    def _prepare_optimizer(self, optimizer: Optimizer) -> PreparedOptimizer:
        performance = self._config.performance
        if performance.fused and chooses_speed(performance) and not is_fused(optimizer):
            message = _make_fused(optimizer, self._ctx.device)
            if self._ctx.is_main:
                log.info("performance: %s", message)
        offload_strategy = offload_of(self._config)
        if offload_strategy is not None:
            # hooks on compiled blocks would be compiled with them; less memory is then used for state on its way
            if compiles_models(self._config):
                models = []
            else:
                models = [self._strategy.unwrap(model) for model in self.done.models]
            offload_strategy.stream_updates(
                optimizer, self._config, self._ctx, lambda: self._clock.boundary, models
            )
        prepared = PreparedOptimizer(optimizer, self._clock, self._precision)
        self.done.optimizers.append(prepared)
        return prepared

    def _note_unowned(self) -> None:
        """Tell the clock whether a trained parameter is in no optimizer."""
        owned_ids = {
            id(parameter)
            for optimizer in self.done.optimizers
            for parameter in optimizer.parameters
        }
        self._clock.has_unowned = bool(owned_ids) and any(
            parameter.requires_grad and id(parameter) not in owned_ids
            for model in self.done.models
            for parameter in model.parameters()
        )

    # Any: schedulers share no base class
    def _prepare_scheduler(self, scheduler: Any) -> PreparedScheduler:
        scheduled_optimizer = getattr(scheduler, "optimizer", None)
        schedule_owner = next(
            (
                prepared_optimizer
                for prepared_optimizer in self.done.optimizers
                if scheduled_optimizer
                in (prepared_optimizer, prepared_optimizer.optimizer)
            ),
            None,
        )
        if schedule_owner is None:
            raise PrepareError(
                f"{type(scheduler).__name__} schedules an optimizer that is not prepared, so it could not follow its "
                "updates; pass the optimizer to prepare() too, before or together with the scheduler."
            )
        prepared = PreparedScheduler(
            scheduler, schedule_owner, self._config.step_scheduler_with_optimizer
        )
        if not self.done.loaders:
            self._before_loaders.append(scheduler)
        elif (steps := self.done.loaders[0].parts.source.steps()) is not None:
            self._warn_of_length(scheduler, self._length_of(steps, steps))
        self.done.schedulers.append(prepared)
        return prepared

    def _prepare_loaders(self, prepare_items: list[Item]) -> None:
        if not prepare_items:
            return
        seed = self._shared_seed()
        for prepare_item in prepare_items:
            prepare_item.value = self.loader(
                prepare_item.value, prepare_item.place, seed
            )

    def _shared_seed(self) -> int:
        """Return the seed of the first rank, which all ranks shuffle with."""
        world, own_seed = self._ctx.world, torch.initial_seed()
        return own_seed if world.size == 1 else int(world.broadcast_object(own_seed))

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
            moves_to_device = self._config.device_placement
        else:
            moves_to_device = moves_batches
        if loader is None:
            prepared = None
        else:
            prepared = self.loader(
                loader, moves_to_device, self._shared_seed(), already_sharded
            )
        return self._replace_prepared((prepared,))[0]

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
            was_apart, self._clock.trains_separately = (
                self._clock.trains_separately,
                True,
            )
            stack.callback(setattr, self._clock, "trains_separately", was_apart)
            yield

    def loader(
        self,
        loader: Any,
        moves_batches: bool,
        seed: int,
        already_sharded: bool | None = None,
    ) -> Any:
        """Prepare a loader."""
        from hasten.data.build import prepare_loader  # on first use

        wraps = () if self.done.loaders else self._clock.parts.source
        config = self._config.dataloader
        prepared: Loader = prepare_loader(
            loader,
            ctx=self._ctx,
            config=config.replace(prefetch=0) if wraps else config,
            clock=self._clock,
            device=self._ctx.device if moves_batches else None,
            seed=seed,
            rng_types=self._rng_types,
            transfer=self._strategy.caps.transfer,
            already_sharded=already_sharded,
        )
        for wrap in wraps:
            prepared.parts = replace(prepared.parts, source=wrap(prepared.parts.source))
        self.done.loaders.append(prepared)
        self._compare_schedules(loader, prepared)
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

    def _compare_schedules(self, loader: Any, prepared: Loader) -> None:
        """Warn about schedules whose length is that of the loader before it was prepared, or its number of batches."""
        schedules, self._before_loaders = self._before_loaders, []
        try:
            loop_length = self._length_of(len(loader), len(prepared))
        except TypeError:  # an iterable dataset without a length
            return
        for schedule in schedules:
            self._warn_of_length(schedule, loop_length)

    def _warn_of_length(self, schedule: Any, loop_length: LoopLength) -> None:
        if not self._ctx.is_main or schedule_length(schedule) in self.right_lengths:
            return
        if length_warning := explain_wrong_length(schedule, loop_length):
            warnings.warn(length_warning, HastenWarning, stacklevel=user_stacklevel())


def user_stacklevel() -> int:
    """Return the stacklevel of a warning, given where this is called, that names the user's line."""
    level, frame = 1, sys._getframe(1)
    while (
        frame.f_back is not None
        and frame.f_globals.get("__name__", "").partition(".")[0] == "hasten"
    ):
        level, frame = level + 1, frame.f_back
    return level
