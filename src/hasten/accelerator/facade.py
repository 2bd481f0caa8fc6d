"""The Accelerator: the public object of a training script, which delegates every decision to its collaborators.

This file is longer than others because it holds every public method once, with its docstring.
"""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from pathlib import Path
from types import NoneType
from typing import (
    TYPE_CHECKING,
    Any,
    Literal,
    Never,
    ParamSpec,
    TypeAlias,
    TypeVar,
    Unpack,
    overload,
)

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.profiler import profile as TorchProfile  # a class torch spells in lower case
from torch.utils.data import DataLoader
from torch.utils.hooks import RemovableHandle

from hasten import trees
from hasten.accelerator import arguments, generating
from hasten.accelerator import step as metrics
from hasten.accelerator import step as profile
from hasten.accelerator.components import components
from hasten.accelerator.preparing import Preparer
from hasten.accelerator.process import Process
from hasten.accelerator.setup import (
    RunLogPart,
    join_world,
    numbers_settings,
    open_run_log,
    open_trackers,
    parts_of_extensions,
    resolve_settings,
)
from hasten.accelerator.step import Accumulation
from hasten.comm import ops
from hasten.comm.agreement import agree
from hasten.comm.base import Comm, ReduceKind
from hasten.config.resolve import Resolved
from hasten.config.root import Config
from hasten.config.sections.loop import (
    AutocastKwargs,
    DataLoaderConfiguration,
    GradientAccumulationPlugin,
    PerformanceSettings,
    ProfileKwargs,
    ProjectConfiguration,
    TorchDynamoPlugin,
    TrackingConfig,
)
from hasten.config.sections.parallel import (
    FullyShardedDataParallelPlugin,
    ParallelismConfig,
)
from hasten.config.sections.trust import TrustSettings
from hasten.data.loader import Loader
from hasten.errors import PrepareError
from hasten.extension import load
from hasten.optim import clip
from hasten.optim.clock import StepClock, check_every
from hasten.optim.ema import EMA, Decay
from hasten.optim.gradients import zero_if_weightless
from hasten.optim.loss_weights import LossWeights
from hasten.optim.optimizer import PreparedOptimizer, refuse_unowned, settle_optimizers
from hasten.optim.run_part import Objects, RunPart, parts_of_every_run
from hasten.optim.window import divide_loss
from hasten.precision.build import build_precision
from hasten.runtime.context import ProcessContext
from hasten.runtime.devices import empty_cache
from hasten.runtime.mesh_plan import BATCH, LOSS, Axis
from hasten.state.preemption import Preemption
from hasten.strategies.base import Strategy
from hasten.strategies.choose import choose_strategy
from hasten.tracking.base import Tracker
from hasten.trees import Tree
from hasten.trust.numbers.numbers import NumbersWatch
from hasten.version import __version__

# the modules of the components below, which are loaded when a component is first used
if TYPE_CHECKING:
    from hasten.checkpoint.state_dicts import LoadReport
    from hasten.progress.bar import Progress
    from hasten.progress.build import ProgressMaker
    from hasten.progress.throughput import Throughput
    from hasten.state.epochs import EpochLoops
    from hasten.state.run_state import LoadHook, RunObjects, SaveHook
    from hasten.state.saving import Saving
    from hasten.strategies.context.strategy import ContextParallel, SequenceShards

log = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
Fields: TypeAlias = Mapping[str, Any]
"""The fields of a settings class as a mapping. Any: values of every type."""


class Accelerator:
    """Entry point for running a plain training loop on any number of processes and devices.

    ```python
    accelerator = Accelerator()
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for x, y in loader:
        loss = loss_fn(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    ```
    Settings given here take precedence over flags, environment and files; None leaves a setting to them. A settings class may also be
    given as a mapping of its fields. Ranks: every rank creates one, with the same settings.

    Args:
        mixed_precision: Compute precision: no, bf16, fp16 or fp8.
        gradient_accumulation_steps: Micro-steps per optimizer update.
        cpu: Train on the CPU even if an accelerator is available.
        device_placement: Move models and batches to the process's device.
        strategy: How training is distributed: auto, none, ddp, fsdp, or a strategy of an extension.
        project_dir: Folder (or URL) of the run: logs, metrics and checkpoints.
        log_with: Name of a tracker, a tracker, or a list of both.
        parallelism_config: Sizes of the mesh axes, with the settings of tensor, context and pipeline parallelism.
        fsdp_plugin: Settings of fully sharded data parallelism; chooses the strategy fsdp.
        dataloader_config: Splitting, shuffling, moving and resuming of loaders.
        gradient_accumulation_plugin: All settings of gradient accumulation.
        dynamo_plugin: Settings of torch.compile.
        project_config: Folders of the run, and the checkpoints to keep.
        performance: Optimizations that change results by rounding at most; "auto" or "off" for all of them.
        trust: Checks for stalls, diverging ranks and bad losses; "off" or "report" for all of them.
        tracking: Settings of trackers that `log_with` does not hold.
        kwargs_handlers: Settings classes of torch's own options: AutocastKwargs, GradScalerKwargs, DistributedDataParallelKwargs,
            InitProcessGroupKwargs, ProfileKwargs, FP8Config, AORecipeKwargs, TERecipeKwargs.
        master_weights: Dtype of half-precision weights trained under mixed precision: fp32, or keep (the model's own).
        recompute: Class names of blocks whose activations are recomputed in backward.
        step_scheduler_with_optimizer: Schedulers step only with an applied update.
        split_batches: The loader's batch size is the global one, split over processes.
        dynamo_backend: Backend of torch.compile; `dynamo_plugin` has the other settings.
        rng_types: Random generators synchronised over all processes at the start of each epoch.
        debug: Show hasten's logs and whole tracebacks.
        context: An existing process context, instead of the launcher's variables.
        extension_settings: Settings of extensions, by the names that they document: `deepspeed_plugin`, `survive`, `metrics`, `offload` and
            others. A name of none of them raises UnknownSettingError with the nearest or the new spelling.
    """

    def __init__(
        self,
        *,
        mixed_precision: str | None = None,
        gradient_accumulation_steps: int | None = None,
        cpu: bool | None = None,
        device_placement: bool | None = None,
        strategy: str | None = None,
        project_dir: str | None = None,
        log_with: Any = None,  # Any: a name, a tracker, or a list of them
        parallelism_config: ParallelismConfig | Fields | None = None,
        fsdp_plugin: FullyShardedDataParallelPlugin | Fields | None = None,
        dataloader_config: DataLoaderConfiguration | Fields | None = None,
        gradient_accumulation_plugin: GradientAccumulationPlugin | Fields | None = None,
        dynamo_plugin: TorchDynamoPlugin | Fields | None = None,
        project_config: ProjectConfiguration | Fields | None = None,
        performance: PerformanceSettings | Fields | str | None = None,
        trust: TrustSettings | Fields | str | None = None,
        tracking: TrackingConfig | Fields | None = None,
        # Any: one of several settings classes
        kwargs_handlers: Sequence[Any] | None = None,
        master_weights: str | None = None,
        recompute: Sequence[str] | None = None,
        step_scheduler_with_optimizer: bool | None = None,
        split_batches: bool | None = None,
        dynamo_backend: str | None = None,
        rng_types: Sequence[str] | None = None,
        debug: bool | None = None,
        context: ProcessContext | None = None,
        **extension_settings: Any,  # Any: sections, mappings, names and numbers
    ) -> None:
        arguments_by_name = locals()
        given_settings = dict[str, Any]()
        for name, value in arguments_by_name.items():
            is_setting = name not in ("self", "context", "extension_settings")
            if is_setting and value is not None:
                given_settings[name] = value
        settings = resolve_settings(given_settings | extension_settings)
        self.config: Config = settings.config
        self.ctx = join_world(settings.config, context)
        self.process = Process(self.ctx)
        self._strategy: Strategy = choose_strategy(self.config, self.ctx)
        accumulation_settings = self.config.gradient_accumulation
        clock = StepClock(
            accumulation_settings.num_steps,
            LossWeights(self.ctx.groups(*LOSS)),
            accumulation_settings.sync_with_dataloader,
        )
        self._clock = clock
        self._precision = build_precision(
            self.config.mixed_precision,
            self.ctx.device,
            self.ctx.world,
            autocast=self.config.autocast,
            scaler=self.config.scaler,
            fp8=self.config.fp8,
            in_flight=lambda: clock.in_flight,
            sharded=self._strategy.caps.sharded_state,
            scales=not self._strategy.caps.owns_precision,
        )
        self._tracking = open_trackers(log_with, self.config, self.ctx)
        self._run_log = open_run_log(settings, self.ctx, self._strategy)
        self._progress: ProgressMaker | None = None
        self._throughput: Throughput | None = None
        self._preparer = Preparer(
            self.config, self.ctx, self._strategy, self._precision, clock
        )
        self._prepared = self._preparer.done
        self._accumulations: dict[tuple[nn.Module, ...], Accumulation] = {}
        accelerator_ref = weakref.ref(
            self
        )  # the clock must not keep the Accelerator alive
        clock.read_position = lambda: (
            None
            if (accelerator := accelerator_ref()) is None
            else accelerator._run_objects.read_position(at_window=True)
        )
        self._is_checked: Callable[[str], bool] = lambda setting: (
            # who passes a context watches it
            context is None or settings.source(setting).kind == "code"
        )
        self._add_parts(settings)

    # -- components that are created on first use -------------------------------------------------------------------
    @cached_property
    def _run_objects(self) -> RunObjects:
        """The objects that checkpoints are made from."""
        from hasten.state.run_state import Randomness, RunObjects  # on first use

        return RunObjects(
            self._prepared,
            self._strategy.unwrap,
            self._clock,
            self._precision,
            Randomness(self.ctx.device),
            self._tracking if self._tracking.names else None,
            self._strategy.drop_gradients,
            averages=self._prepared.averages,
        )

    @cached_property
    def _saving(self) -> Saving:
        """Saving and loading of this run's checkpoints."""
        from hasten.state.saving import Saving  # on first use

        self._run_objects.epochs = self._epochs
        return Saving(
            self.ctx,
            self.config.project,
            self._run_objects,
            notes={
                "strategy": self._strategy.name,
                "mixed_precision": self.config.mixed_precision,
            },
            whole=self.config.fsdp.state_dict_type == "FULL_STATE_DICT",
        )

    @cached_property
    def _publishing(self) -> Any:  # Any: a class of an extension
        """Uploads of this run's models to the Hub."""
        return load("uploads", "hub")(
            self.ctx.world,
            self.is_main_process,
            self._describe_run,
            self.config.project.project_dir,
        )

    def _describe_run(self) -> dict[str, Any]:  # Any: numbers and strings
        """Return a description of the run for model cards."""
        precision = self.config.mixed_precision
        return {
            "processes": self.num_processes,
            "strategy": self.strategy,
            "mixed_precision": precision,
            "updates": self._clock.num_updates,
            "hasten": __version__,
            "torch": torch.__version__,
        }

    @cached_property
    def _epochs(self) -> EpochLoops:
        from hasten.state.epochs import EpochLoops  # on first use

        self._run_objects.epochs = EpochLoops(self._prepared, self._clock)
        return self._run_objects.epochs

    @cached_property
    def _context(self) -> ContextParallel:
        from hasten.strategies.context.strategy import ContextParallel  # on first use

        return ContextParallel(
            self.config.parallelism,
            self.ctx,
            self._clock,
            lambda: self._prepared.models,
        )

    def _add_parts(self, settings: Resolved) -> None:
        """Add the parts of this run, in the order of their events."""
        if self.ctx.mesh.cp > 1:
            self._preparer.on_call = lambda model: self._context.watch_model(
                model, self._strategy.unwrap(model)
            )
        self._preemption = Preemption(self.ctx.world, self._clock)
        run_part_members: list[RunPart] = [self._preemption]
        number_settings = numbers_settings(self.config, self._strategy, self._precision)
        if number_settings is not None:
            numbers_watch = NumbersWatch(
                self._prepared,
                self.unwrap_model,
                self.ctx,
                self._clock,
                number_settings,
            )
            run_part_members.append(numbers_watch)
        if self.config.checkpoint_in_memory is not None:
            load("run_parts", "checkpoint_in_memory")  # an error if nothing provides it
        if self._run_log is not None:
            run_part_members.append(RunLogPart(self._run_log, self._clock))
        run_part_members += parts_of_every_run() or parts_of_extensions(
            settings, self.ctx.world.size
        )
        run_parts = self._clock.parts
        run_parts.add(*run_part_members)
        for begin_event in run_parts.built:
            begin_event(components(self))
        log.debug("the parts of this run, with their events:\n%s", run_parts)

    if not TYPE_CHECKING:  # a type checker must still find misspelt attributes

        def __getattr__(self, name: str) -> Never:
            raise AttributeError(
                f"hasten's Accelerator has no attribute {name!r}. Settings are in accelerator.config; for a name of Hugging Face Accelerate, "
                "docs/migration/accelerate.md has the replacement.",
                name=name,
                obj=self,
            )

    # -- this process and the others -----------------------------------------------------------------------------
    @property
    def device(self) -> torch.device:
        """The device of this process."""
        return self.ctx.device

    @property
    def num_processes(self) -> int:
        """The number of processes in the world."""
        return self.process.num_processes

    @property
    def process_index(self) -> int:
        """The rank of this process in the world."""
        return self.process.process_index

    @property
    def local_process_index(self) -> int:
        """The rank of this process on its node."""
        return self.process.local_process_index

    @property
    def is_main_process(self) -> bool:
        """True if this is rank 0 of the world."""
        return self.process.is_main_process

    @property
    def is_local_main_process(self) -> bool:
        """True if this is rank 0 of its node."""
        return self.process.is_local_main_process

    @property
    def strategy(self) -> str:
        """The name of the strategy that this run uses: none, ddp, fsdp, …"""
        return self._strategy.name

    @property
    def mixed_precision(self) -> str:
        """The precision of this run: no, bf16, fp16 or fp8."""
        return self._precision.spec

    def wait_for_everyone(self) -> None:
        """Block until every process has reached this call. Ranks: every rank."""
        self._tracking.send()
        self.process.wait_for_everyone()

    def print(self, *args: Any, **kwargs: Any) -> None:  # Any: arguments of print
        """Print once per node."""
        self.process.print(*args, **kwargs)

    def main_process_first(self) -> AbstractContextManager[None]:
        """Context manager that runs its block on the main process, then on the others; errors are raised on all ranks."""
        return self.process.main_process_first()

    def on_main_process(self, function: Callable[P, R]) -> Callable[P, R | None]:
        """Decorate a function to run on the main process only; it returns None elsewhere."""
        return self.process.on_main_process(function)

    def split_between_processes(
        self, inputs: Any, apply_padding: bool = False
    ) -> AbstractContextManager[Any]:
        """Context manager that yields this process's share of a list, tuple, dict of those, tensor or dataset."""
        return self.process.split_between_processes(inputs, apply_padding)

    def set_trigger(self) -> None:
        """Set a flag that `check_trigger` returns on every process. Ranks: any."""
        self.process.set_trigger()

    def check_trigger(self) -> bool:
        """Return whether any process has set the trigger; the call resets it. Ranks: every rank."""
        return self.process.check_trigger()

    # -- preparing ------------------------------------------------------------------------------------------------
    def init_module(self) -> AbstractContextManager[None]:
        """Return a context manager in which models are built sharded if the strategy supports it (ZeRO 3), otherwise unchanged.

        Ranks: every rank builds the same models in the same order.
        """
        return self._strategy.building(self.ctx)

    def prepare(
        self, *objects: Any, device_placement: Sequence[bool] | None = None
    ) -> Any:
        """Prepare models, optimizers, schedulers and loaders for this run; they are returned in the order given.

        An optimizer may be a factory such as `partial(AdamW, lr=1e-3)`. One object is returned by itself, several as a
        tuple. Ranks: every rank, with the same objects in the same order.
        """
        if device_placement is not None:
            requirement = "it needs a list with True or False for each object"
            arguments.check_type(
                "prepare(device_placement)", Sequence, requirement, device_placement
            )
            arguments.check_type(
                "prepare(device_placement)", bool, requirement, *device_placement
            )
        if set(map(type, objects)) == {NoneType}:
            raise PrepareError(
                "prepare() got nothing but None, so nothing is prepared; give a model, optimizer or loader."
            )
        for replace_objects in self._clock.parts.preparing:
            objects = replace_objects(objects)
        prepared = self._preparer.prepare(objects, device_placement)
        return prepared[0] if len(prepared) == 1 else prepared

    def prepare_model(
        self,
        model: nn.Module,
        device_placement: bool | None = None,
        evaluation_mode: bool = False,
    ) -> nn.Module:
        """Prepare one model; with `evaluation_mode` it is placed, cast and compiled, but not wrapped for training."""
        placement = None if device_placement is None else [device_placement]
        objects: Objects = (model,)
        for replace_objects in self._clock.parts.preparing:
            objects = replace_objects(objects)
        prepared: nn.Module = self._preparer.prepare(
            objects, placement, train=not evaluation_mode
        )[0]
        return prepared

    def prepare_data_loader(
        self,
        data_loader: Any,
        device_placement: bool | None = None,
        already_sharded: bool | None = None,
    ) -> Loader:
        """Prepare a loader; it reads this process's share and puts the batches on the device.

        With `already_sharded=True` the loader holds only this process's share. The default is the setting of
        `DataLoaderConfiguration`.
        """
        requirement = "it needs a torch.utils.data.DataLoader, whose dataset and sampler can be divided. Wrap the data in one"
        arguments.check_type(
            "prepare_data_loader(data_loader)", DataLoader, requirement, data_loader
        )
        loader: Any = data_loader
        for replace in self._clock.parts.preparing:
            (loader,) = replace((loader,))
        prepared: Loader = self._preparer.prepare_loader(
            loader, device_placement, already_sharded
        )
        return prepared

    def num_updates(self, loader: Loader, epochs: int = 1) -> int:
        """Return the number of optimizer updates in so many epochs of a prepared loader, which is the length of a schedule over them.

        It is ceil(len(loader) / gradient_accumulation_steps) * epochs.
        """
        arguments.check_cursor(loader, "num_updates(loader)")
        arguments.check_number("num_updates(epochs)", epochs, is_integer=True)
        return self._preparer.num_updates(loader, epochs)

    def epochs(self, num_epochs: int) -> Iterator[int]:
        """Return an iterator over `num_epochs` epoch numbers, from 0, or after `load_state` from the checkpoint's epoch.

        After loading a checkpoint saved inside an epoch, that epoch is yielded again and its loader returns the remaining batches; after
        one saved at the end of an epoch, the next number is yielded. Ranks: every rank.
        """
        arguments.check_number(
            "epochs(num_epochs)", num_epochs, least=0, is_integer=True
        )
        return self._epochs.over(num_epochs)

    # -- one step -------------------------------------------------------------------------------------------------
    def accumulate(
        self, *models: nn.Module, loader: Loader | None = None
    ) -> Accumulation:
        """Context manager for one micro-step of these models (all prepared models by default).

        Optimizers and schedulers step, and gradients are synchronised, only at the end of an accumulation window. The end
        of an epoch of `loader` also ends the window; by default this is the first loader to advance in each step.
        """
        if loader is None:
            self._clock.loaders.followed = None
        else:
            self._clock.loaders.followed = arguments.check_cursor(
                loader, "accumulate(loader)"
            )
        try:
            accumulation = self._accumulations.get(models)
        except TypeError:  # not hashable, so not a module: refused below
            accumulation = None
        if accumulation is not None:
            return accumulation
        arguments.check_type("accumulate(models)", nn.Module, arguments.MODELS, *models)
        for model in models:
            self._prepared.index_of(model)
        syncs_each_batch = self.config.gradient_accumulation.sync_each_batch
        new_accumulation = Accumulation(
            self._clock,
            self._strategy,
            models or tuple(self._prepared.models),
            syncs_each_batch,
        )
        if models:  # the default, all prepared models, may differ in the next call
            self._accumulations[models] = new_accumulation
        return new_accumulation

    def ema(self, model: nn.Module, decay: Decay = 0.999) -> EMA:
        """Return an exponential moving average of a prepared model's weights, updated after every applied update.

        `decay` is a number or a function of the number of updates. Parameters that no optimizer holds are not averaged.
        Evaluate and export inside `with ema.swapped():`. The average is part of `save_state` and `load_state`.
        Ranks: every rank.
        """
        self._preparer.done.index_of(model)
        ema_part = EMA(
            self._strategy.unwrap(model),
            self._preparer.done.optimizers,
            decay,
        )
        self._preparer.done.averages.append(ema_part.state)
        self._clock.parts.add(ema_part)
        return ema_part

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Context manager in which backward does not synchronise this model's gradients."""
        arguments.check_type("no_sync(model)", nn.Module, arguments.MODELS, model)
        return self._strategy.no_sync(model)

    @property
    def sync_gradients(self) -> bool:
        """True if the current micro-step ends its accumulation window."""
        return self._clock.boundary

    @sync_gradients.setter
    def sync_gradients(self, value: bool) -> None:
        arguments.check_type(
            "sync_gradients = value", bool, "it needs True or False", value
        )
        self._clock.force_boundary(value)

    @property
    def gradient_accumulation_steps(self) -> int:
        """The number of micro-steps per update; a change takes effect with the next window."""
        return self._clock.every

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, value: int) -> None:
        check_every(value)
        self._clock.every = value

    def backward(
        self, loss: Tensor, weight: float | Tensor | None = None, **kwargs: Any
    ) -> None:
        """Backpropagate the loss, scaled so that the window's gradient is the mean over all its micro-batches and ranks.

        With `weight`, the number of tokens or samples that `loss` averages, the mean is weighted accordingly.
        `kwargs` are passed to `Tensor.backward`.
        """
        if type(loss) is not Tensor:
            arguments.check_loss(
                loss, self._clock.active and self._clock.active.current_batch
            )
        clock = self._clock
        clock.num_passes += 1
        run_parts = clock.parts
        for begin_event in run_parts.backward:
            begin_event()
        if clock.every > 1 and clock.is_inside and clock.checks_models:
            clock.refuse_plain_optimizers()
        weighed, divisor = clock.weigh(loss, weight)
        if self._precision.scaler is not None:
            weighed = self._precision.scale(divide_loss(weighed, divisor))
            divisor = 1
        weights = clock.weights
        if weights.idle or weights.share is not None:
            weight = weights.effective(weight)
        for watch_loss in run_parts.loss:
            watch_loss(loss, weight)
        if weight is None:
            self._strategy.backward(weighed, divisor, **kwargs)
        else:
            with zero_if_weightless(loss, weight, weights.joined):
                self._strategy.backward(weighed, divisor, **kwargs)
        for end_event in run_parts.backward_done:
            end_event()

    def forward_backward(
        self,
        model: nn.Module,
        batch: Tree,
        loss_of: Callable[[nn.Module, Tree], Tensor],
        weight: Callable[[Any], float | Tensor] | None = None,
    ) -> Tensor:
        """Run forward and backward on one batch; returns the loss, detached and equal on every pipeline stage.

        `loss_of(model, batch)` returns the mean loss, as in a plain loop. Under pipeline parallelism it is called for every
        micro-batch on every stage, and this replaces `backward`; elsewhere it is the same as calling `backward(loss_of(model, batch),
        weight=weight(batch))`. `weight(batch)` is the number of tokens or samples that the loss of a batch averages; without it
        micro-batches are weighted by their number of labels that torch's cross entropy does not ignore. Ranks: every rank. Any: a batch.
        """
        arguments.check_type(
            "forward_backward(model)", nn.Module, arguments.MODELS, model
        )
        arguments.check_type(
            "forward_backward(loss_of)", Callable, arguments.FUNCTION, loss_of
        )
        arguments.check_type(
            "forward_backward(weight)", Callable | None, arguments.FUNCTION, weight
        )
        self._clock.num_passes += 1
        run_parts = self._clock.parts
        for begin_event in run_parts.backward:
            begin_event()
        loss_weights: list[float | Tensor | None] = []

        def weigh_loss(loss: Tensor, weight: float | Tensor | None = None) -> Tensor:
            loss_weights.append(weight)
            return self._precision.scale(divide_loss(*self._clock.weigh(loss, weight)))

        loss = self._strategy.forward_backward(
            model, batch, loss_of, weigh_loss, weight
        )
        for watch_loss in run_parts.loss:
            watch_loss(loss, loss_weights[-1])
        for end_event in run_parts.backward_done:
            end_event()
        return loss

    def capture_step(self, fn: Callable[P, R]) -> Callable[P, R]:
        """Decorate a training step (forward, `backward()`, `step()`, `zero_grad()`) to run as one CUDA graph where possible.

        With `performance="auto"` on one GPU, after a few plain calls, the step is captured for each set of input shapes and replayed.
        The step must do the same work in every call: numbers that Python reads or changes are frozen, except learning rates. Elsewhere
        the function itself runs, and the reason is logged. Tensors are returned without gradients.
        """
        arguments.check_type("capture_step(fn)", Callable, arguments.FUNCTION, fn)
        for note in self._clock.parts.capturing:
            note()
        wrap_step = load("step_wrappers", "capture_step")
        step: Callable[P, R] = wrap_step(fn, components(self))
        return step

    def context_parallel(
        self,
        buffers: Sequence[Tensor],
        dims: Sequence[int],
        labels: Tensor | Literal["auto"] | None = "auto",
        no_restore_buffers: Iterable[Tensor] = (),
    ) -> AbstractContextManager[SequenceShards]:
        """Context manager in which each buffer holds this rank's shard along its dimension, and attention spans all shards.

        Run forward and backward inside; the buffers are restored on exit, except `no_restore_buffers`. Each rank's loss is weighted by its number of
        labels other than -100, taken from `labels` (by default the buffer that contains -100); None weights ranks equally.
        """
        return self._context.open_block(
            buffers, dims, no_restore_buffers, labels=labels
        )

    def autocast(
        self, autocast_handler: AutocastKwargs | None = None
    ) -> AbstractContextManager[None]:
        """Context manager that runs code outside a prepared model in this run's compute precision."""
        arguments.check_type(
            "autocast(handler)",
            AutocastKwargs | None,
            "it needs an AutocastKwargs(...)",
            autocast_handler,
        )
        return self._precision.forward_context(autocast_handler)

    # Any: one optimizer, several, or None for all
    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Unscale and normalise the gradients at the end of a window; calling it again does nothing. Ranks: every rank."""
        if not self._clock.boundary:
            return
        optimizers = self._prepared.optimizers if optimizer is None else optimizer
        for prepared_optimizer in (
            optimizers if isinstance(optimizers, (list, tuple)) else [optimizers]
        ):
            if not isinstance(prepared_optimizer, PreparedOptimizer):
                arguments.refuse(
                    "unscale_gradients(optimizer)",
                    prepared_optimizer,
                    "it needs optimizers that prepare() returned",
                )
            prepared_optimizer.settle()

    def clip_grad_norm_(
        self,
        parameters: Tensor | Iterable[Tensor],
        max_norm: float,
        norm_type: float = 2.0,
    ) -> Tensor | None:
        """Clip gradients to a global norm at the end of a window; returns the norm before clipping, None inside a window.

        Ranks: every rank.
        """
        if not self._clock.boundary:
            return None
        requirement = (
            "it needs the order of a norm, above 0: 2.0, or inf for the largest element"
        )
        arguments.check_type(
            "clip_grad_norm_(norm_type)", int | float, requirement, norm_type
        )
        if not norm_type > 0:
            arguments.refuse("clip_grad_norm_(norm_type)", norm_type, requirement)
        clipped_parameters = self._to_clip(parameters, max_norm, "clip_grad_norm_")
        norm = self._strategy.clip_norm(clipped_parameters, max_norm, norm_type)
        for watch_loss in self._clock.parts.clipped:
            watch_loss(norm)
        return norm

    def clip_grad_value_(
        self, parameters: Tensor | Iterable[Tensor], clip_value: float
    ) -> None:
        """Clamp every gradient element to [-clip_value, clip_value] at the end of a window. Ranks: every rank."""
        if self._clock.boundary:
            self._strategy.clip_value(
                self._to_clip(parameters, clip_value, "clip_grad_value_"), clip_value
            )

    def _to_clip(
        self, parameters: Tensor | Iterable[Tensor], limit: float, call: str
    ) -> list[Tensor]:
        """Return the checked parameters with their gradients unscaled."""
        arguments.check_number(f"{call}(…, limit)", limit, least=0)
        requirement = "it needs parameters (tensors). Give model.parameters()"
        arguments.check_type(f"{call}(parameters)", Iterable, requirement, parameters)
        checked_parameters = clip.as_list(parameters)
        arguments.check_type(
            f"{call}(parameters)", Tensor, requirement, *checked_parameters
        )
        settle_optimizers(checked_parameters, self._prepared.optimizers)
        clock = self._clock
        is_rescaled = (
            clock.every > 1
            or clock.needs_correction
            or self._precision.scaler is not None
        )
        if clock.has_unowned and is_rescaled:
            refuse_unowned(checked_parameters, self._prepared.optimizers)
        return checked_parameters

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """True if any optimizer's latest step was skipped because gradients overflowed."""
        return any(
            optimizer.step_was_skipped for optimizer in self._prepared.optimizers
        )

    def join_uneven_inputs(
        self, joinables: Sequence[Any], even_batches: bool | None = None
    ) -> AbstractContextManager[None]:  # Any: prepared models and optimizers
        """Context manager in which processes may run out of batches at different times."""
        requirement = "it needs a list of prepared models and optimizers"
        arguments.check_type(
            "join_uneven_inputs(joinables)", Iterable, requirement, joinables
        )
        arguments.check_type(
            "join_uneven_inputs(joinables)",
            nn.Module | Optimizer,
            requirement,
            *joinables,
        )
        arguments.check_type(
            "join_uneven_inputs(even_batches)",
            bool | None,
            "it needs True or False",
            even_batches,
        )
        return self._preparer.join(joinables, even_batches)

    def generate(
        self, model: nn.Module, batch: Any, *, gather: bool = True, **options: Any
    ) -> Tensor:  # Any: the prompts of a batch, and options of the model's generate()
        """Return the tokens that a prepared model generates for a batch of prompts, of all processes in input order.

        Works with replicated and sharded models and with prompts of different lengths; `options` are those of the model's
        `generate`. Rows are padded to the longest of all processes, and samples that a loader added as padding are dropped.
        With `gather=False` each process gets its own rows. Ranks: every rank.
        """
        self._prepared.index_of(model)
        unwrapped_model = self._strategy.unwrap(model)
        with self.autocast():
            tokens = generating.generate(
                unwrapped_model, batch, self.num_processes, options
            )
        if not gather:
            return tokens
        tokens = self.pad_across_processes(
            tokens,
            dim=1,
            pad_index=generating.padding_token(unwrapped_model, options),
            axes=tuple(BATCH),
        )
        if self._clock.active is None:
            gathered_tokens: Tensor = self.gather(tokens, axes=tuple(BATCH))
        else:
            gathered_tokens = self.gather_for_metrics(tokens)
        return gathered_tokens

    def mark_forward_method(self, model: nn.Module, name: str) -> None:
        """Make calls of `model.name(...)` synchronise gradients like calls of the model itself."""
        arguments.check_type(
            "mark_forward_method(model)", nn.Module, arguments.MODELS, model
        )
        self._prepared.index_of(model)
        unwrapped_model = self.unwrap_model(model)
        if not callable(getattr(unwrapped_model, str(name), None)):
            raise PrepareError(
                f"mark_forward_method({type(unwrapped_model).__name__}, {name!r}): {type(unwrapped_model).__name__} has no method {name!r} to mark, so calls "
                "would not synchronise gradients; check the spelling."
            )
        self._strategy.mark_forward_method(model, name)

    # -- collectives ----------------------------------------------------------------------------------------------
    def gather(self, tensor: Tree, axes: Sequence[Axis] | None = None) -> Tree:
        """Concatenate the tensors of all processes along the first dimension, over the world or the given mesh axes."""
        arguments.check_tensors(tensor, "gather(tensor)")
        return ops.gather(tensor, self._comm_over(axes))

    def reduce(
        self,
        tensor: Tree,
        reduction: ReduceKind = "sum",
        scale: float = 1.0,
        axes: Sequence[Axis] | None = None,
    ) -> Tree:
        """Reduce tensors over processes by sum, mean, min or max, and multiply by `scale`."""
        arguments.check_tensors(tensor, "reduce(tensor)")
        arguments.check_number("reduce(scale)", scale)
        return ops.reduce(tensor, self._comm_over(axes), reduction, scale)

    def gather_ragged(self, tensor: Tree, axes: Sequence[Axis] | None = None) -> Tree:
        """Concatenate tensors like `gather`, for processes whose tensors differ in their number of rows."""
        arguments.check_tensors(tensor, "gather_ragged(tensor)")
        return ops.gather_ragged(tensor, self._comm_over(axes))

    def broadcast(
        self, tensor: Tree, from_process: int = 0, axes: Sequence[Axis] | None = None
    ) -> Tree:
        """Broadcast the tensors of one process to all."""
        arguments.check_tensors(tensor, "broadcast(tensor)")
        arguments.check_number(
            "broadcast(from_process)", from_process, least=0, is_integer=True
        )
        return ops.broadcast(tensor, self._comm_over(axes), from_process)

    def pad_across_processes(
        self,
        tensor: Tree,
        dim: int = 0,
        pad_index: float = 0,
        pad_first: bool = False,
        axes: Sequence[Axis] | None = None,
    ) -> Tree:
        """Pad tensors along `dim` to the largest size on any process."""
        arguments.check_tensors(tensor, "pad_across_processes(tensor)")
        arguments.check_number("pad_across_processes(dim)", dim, is_integer=True)
        arguments.check_number("pad_across_processes(pad_index)", pad_index)
        padded = ops.pad_across(
            tensor, self._comm_over(axes), dim, pad_index, pad_first
        )
        num_dims = [leaf.ndim for leaf in trees.tensors(tensor)]
        if not any(-count <= dim < count for count in num_dims):
            requirement = f"the tensors have {max(num_dims, default=0)} dimensions. Give one of these, counted from 0"
            arguments.refuse("pad_across_processes(dim)", dim, requirement)
        return padded

    # Any: the user's objects
    def gather_object(self, obj: Any, axes: Sequence[Axis] | None = None) -> list[Any]:
        """Gather one object per process into a list; if every process passes a list, the lists are concatenated."""
        return ops.gather_object(obj, self._comm_over(axes))

    def broadcast_object_list(
        self,
        objects: list[Any],
        from_process: int = 0,
        axes: Sequence[Axis] | None = None,
    ) -> list[Any]:  # Any: the user's objects
        """Replace the items of the list in place by those of one process."""
        arguments.check_number(
            "broadcast_object_list(from_process)",
            from_process,
            least=0,
            is_integer=True,
        )
        arguments.check_type(
            "broadcast_object_list(objects)",
            list,
            "it needs a list, whose items are replaced",
            objects,
        )
        return ops.broadcast_object_list(objects, self._comm_over(axes), from_process)

    def gather_for_metrics(
        self,
        input_data: Any,
        use_gather_object: bool = False,
        loader: Loader | None = None,
        dim: int | None = None,
    ) -> Any:  # Any: tensors or objects
        """Gather results of the current batch from all processes; samples added as padding are dropped.

        `loader` names the loader of the batch when several are iterated at the same time. `dim` is the dimension of the
        samples, by default the first: `dim=1` for time-major results.
        """
        if dim is not None:
            arguments.check_number("gather_for_metrics(dim)", dim, is_integer=True)
        loaders = self._clock.loaders
        if loader is None:
            cursor = loaders.single_cursor()
        else:
            cursor = arguments.check_cursor(loader, "gather_for_metrics(loader)")
        return metrics.gather_for_metrics(
            input_data, self.ctx.groups(*BATCH), cursor, use_gather_object, dim
        )

    def _comm_over(self, axes: Sequence[Axis] | None) -> Comm:
        if axes is None:
            return self.ctx.world
        arguments.check_axes(axes)
        return self.ctx.groups(*axes)

    # -- tracking and progress --------------------------------------------------------------------------------------
    def init_trackers(
        self,
        project_name: str,
        config: Any = None,
        init_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Start a run with every tracker; `config` is a mapping, namespace or dataclass of settings. Ranks: every rank."""
        if self._tracking.names:
            with agree(self.ctx.world, "init_trackers"):
                self._tracking.check_directory()
        self._tracking.init(project_name, config, init_kwargs)

    def log(
        self,
        values: Mapping[str, Any],
        step: int | None = None,
        log_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Log numbers and strings to every tracker; tensors are read later, without a device sync. Ranks: any.

        `step` is by default the number of updates of the prepared optimizers; without one, calls are counted. After `track_throughput()`, `tokens_per_second` and `mfu` are added.
        """
        if isinstance(values, Mapping):
            for change_values in self._clock.parts.log:
                changed = change_values(values)
                if changed is None:
                    return
                values = changed
        self._tracking.log(values, self._updates if step is None else step, log_kwargs)

    @property
    def _updates(self) -> int | None:
        """The number of updates of the run, which numbers logged values; None without a prepared optimizer."""
        return max(
            (optimizer.num_updates for optimizer in self._prepared.optimizers),
            default=None,
        )

    def log_images(
        self,
        values: Mapping[str, Any],
        step: int | None = None,
        log_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Log images (arrays, tensors or PIL images) to every tracker that supports them. Ranks: any."""
        self._tracking.log_images(
            values, self._updates if step is None else step, log_kwargs
        )

    def log_table(
        self,
        name: str,
        columns: Sequence[str] | None = None,
        data: Sequence[Sequence[Any]] | None = None,
        dataframe: Any = None,  # Any: a pandas DataFrame, or a similar object
        step: int | None = None,
        log_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Log a table given as `columns` and `data` or as a `dataframe`. Ranks: any."""
        step = self._updates if step is None else step
        self._tracking.log_table(name, columns, data, dataframe, step, log_kwargs)

    def track_throughput(
        self,
        tokens: str | Callable[[Any], int] | None = None,
        *,
        peak_tflops: float | None = None,
        flops_per_token: float | None = None,
    ) -> Throughput:
        """Measure tokens a second and MFU from here on; returns the object that holds them.

        They appear in progress bars, in `log()`, in `hasten top` and in reports. `tokens` names the field of a batch that holds
        tokens (by default `labels`, else `input_ids`), or is a function that counts them. MFU needs the operations of a token,
        such as 6 for each parameter; the peak comes from hasten's table, or from `peak_tflops` for one device. Any: a batch.
        Ranks: every rank, before the loop over a prepared loader.
        """
        if self._throughput is not None:
            self._throughput.detach()
        # not needed without it
        from hasten.progress.throughput import Throughput

        throughput = Throughput(
            self.ctx,
            self._clock,
            self.config.mixed_precision,
            tokens,
            peak_tflops,
            flops_per_token,
        )
        throughput.attach()
        self._throughput = throughput
        return throughput

    @property
    def trackers(self) -> list[Tracker]:
        """The trackers that are active on this process."""
        return self._tracking.trackers

    # Any: with unwrap, a foreign package's object
    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """Return the tracker of this name; with `unwrap`, the run or writer object of its package."""
        return self._tracking.get(name, unwrap)

    def end_training(self) -> None:
        """Check the last losses, compare ranks, wait for background saves and uploads, close the trackers. Ranks: every rank.

        Everything is closed before the first error is raised.
        Raises: DivergenceError when ranks that must hold the same values do not; HubError when a background upload failed.
        """
        first_error: Exception | None = None
        for close_part in self._closing_steps():
            try:
                close_part()
            except Exception as error:  # of any type: what follows is closed first
                first_error = first_error or error
        try:
            self._tracking.finish(failed=first_error is not None)
        finally:
            if first_error is not None:
                raise first_error

    def _closing_steps(self) -> Iterator[Callable[[], object]]:
        """Yield what ends this run, but for the trackers, in order."""
        yield from self._clock.parts.end
        if "_saving" in self.__dict__:
            yield self._saving.close
        if "_publishing" in self.__dict__:
            yield self._publishing.wait

    @overload
    def progress(self, iterable: Iterable[T], **options: Any) -> Progress[T]: ...
    @overload
    def progress(self, iterable: None = None, **options: Any) -> Progress[Any]: ...
    def progress(
        self, iterable: Iterable[T] | None = None, **options: Any
    ) -> Progress[T]:
        """Return a progress bar for the main process with loss, rates, memory and time left; see docs/tracking.md for options."""
        if iterable is not None:
            requirement = "it needs what a loop iterates over, such as a loader"
            arguments.check_type("progress(iterable)", Iterable, requirement, iterable)
        if options.get("total") is not None:
            arguments.check_number(
                "progress(total)", options["total"], least=0, is_integer=True
            )
        if self._progress is None:
            # imports rich, which is not needed without a bar
            from hasten.progress.build import ProgressMaker

            self._progress = ProgressMaker(self.ctx, self._clock.parts)
        return self._progress(iterable, **options)

    # -- checkpoints ----------------------------------------------------------------------------------------------
    def save_state(
        self,
        output_dir: str | Path | None = None,
        safe_serialization: bool = True,
        blocking: bool = True,
        metrics: Mapping[str, float] | None = None,
    ) -> str:
        """Save everything needed to resume the run, atomically; returns the checkpoint's path. Ranks: every rank.

        Without a folder, checkpoints are numbered under `project_dir/checkpoints`. With `blocking=False` the checkpoint is
        written in the background. `metrics` are used to rank checkpoints for `keep_best`. With `survive`, the first of the present
        replicas saves for all; the others get an empty text.
        """
        return self._saving.save_state(
            output_dir, safe_serialization, blocking, metrics
        )

    def load_state(
        self,
        input_dir: str | Path | None = None,
        strict: bool = True,
        allow_pickle: bool = False,
        must_exist: bool = True,
    ) -> list[LoadReport]:
        """Restore the run from a checkpoint, by default the newest complete one, in memory or on disk. Ranks: every rank.

        Returns a report for each model. With `must_exist=False` a run without a checkpoint begins anew: nothing is loaded, and the
        list is empty.
        """
        if input_dir is not None and not must_exist:
            arguments.refuse(
                "load_state(input_dir, must_exist=False)",
                input_dir,
                "must_exist=False is for the newest checkpoint. Leave out one of the two",
            )
        return self._saving.load_state(
            input_dir, strict, allow_pickle, must_exist=must_exist
        )

    def wait_for_saves(self) -> None:
        """Wait for background saves; if one failed, its error is raised here. Ranks: every rank."""
        self._saving.wait_for_saves()

    # Any: objects with state_dict and load_state_dict
    def register_for_checkpointing(self, *objects: Any) -> None:
        """Include these objects in `save_state` and `load_state`."""
        self._saving.register_for_checkpointing(*objects)

    def register_save_state_pre_hook(self, hook: SaveHook) -> RemovableHandle:
        """Call `hook(models, weights, folder)` before each save; the hook may edit the weights that are written."""
        arguments.check_type(
            "register_save_state_pre_hook(hook)", Callable, arguments.FUNCTION, hook
        )
        return self._saving.register_save_state_pre_hook(hook)

    def register_load_state_pre_hook(self, hook: LoadHook) -> RemovableHandle:
        """Call `hook(models, folder)` before each load; models that the hook removes from the list are not loaded."""
        arguments.check_type(
            "register_load_state_pre_hook(hook)", Callable, arguments.FUNCTION, hook
        )
        return self._saving.register_load_state_pre_hook(hook)

    @property
    def preempted(self) -> bool:
        """True if any rank has received SIGTERM or SIGUSR1. Ranks: every rank, once per step.

        With `survive`, a signal to the launcher ends all replicas after the same update; one to a single replica, that replica alone.
        """
        return self._preemption.agreed()

    def save_model(
        self,
        model: nn.Module,
        save_directory: str | Path,
        max_shard_size: float | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Write the weights of a prepared model as safetensors in the Hub layout. Ranks: every rank."""
        arguments.check_type("save_model(model)", nn.Module, arguments.MODELS, model)
        self._export_weights(
            self.get_state_dict(model),
            save_directory,
            max_shard_size,
            safe_serialization,
        )

    def _export_weights(
        self,
        state: Mapping[str, Tensor],
        save_directory: str | Path,
        max_shard_size: float | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Write a whole state in the Hub layout. Ranks: every rank."""
        with agree(self.ctx.world, "save_model"):
            if self._writes:
                from hasten.checkpoint import export  # on first use

                export.save_model(
                    state, save_directory, max_shard_size, safe_serialization
                )

    def load_model(
        self, model: nn.Module, directory: str | Path, strict: bool = True
    ) -> LoadReport:
        """Load exported weights into a prepared model; each rank reads only its slices. Ranks: every rank.

        `directory` may be a repository of the Hub, `hf://owner/name` or `hf://owner/name@revision`, which one process of each
        machine downloads.
        """
        if str(directory).startswith("hf://"):
            directory = load("uploads", "hub").download(
                self.ctx.world, str(directory), self.is_local_main_process
            )
        with agree(self.ctx.world, "load_model"), self._strategy.whole_weights(model):
            from hasten.checkpoint.export import load_weights  # on first use

            return load_weights(self._strategy.unwrap(model), directory, strict)

    def push_to_hub(
        self,
        model: nn.Module,
        repo_id: str,
        *,
        metrics: Mapping[str, Any] | None = None,
        blocking: bool = True,
        **options: Unpack[arguments.PushOptions],
    ) -> str | None:  # Any: numbers and strings
        """Upload a prepared model with a model card; returns the commit's URL on the main process. Ranks: every rank.

        With `blocking=False` the main process uploads in the background while all ranks train; an error of the upload is raised
        at the next push or in `end_training()`. `metrics` appear in the card. Options: `token`, `private`, `revision`,
        `commit_message`, `max_shard_size` and `tokenizer`. After an interruption, large files that have arrived are not sent again.
        Raises: HubError, which never holds the token.
        """
        arguments.check_type("push_to_hub(model)", nn.Module, arguments.MODELS, model)
        self._publishing.wait()
        weights = self.get_state_dict(model)
        url: str | None = self._publishing.push_model(
            self.unwrap_model(model), weights, repo_id, metrics, blocking, options
        )
        return url

    # Any: the user's object
    def save(self, obj: Any, f: str | Path, safe_serialization: bool = False) -> None:
        """Write an object to a file, atomically and on the main process only. Ranks: any."""
        if self._writes:
            from hasten.checkpoint.export import save_object  # on first use

            save_object(obj, f, safe_serialization)

    # Any: the user's object
    def load(self, f: str | Path, allow_pickle: bool = False) -> Any:
        """Read an object written by `save`, with its tensors on the CPU; a `.safetensors` file gives a dict. Ranks: any.

        Raises: UnsafeCheckpointError for a file that runs code when it is unpickled, unless `allow_pickle`.
        """
        from hasten.checkpoint.export import load_object  # on first use

        return load_object(f, allow_pickle)

    @property
    def _writes(self) -> bool:
        if self.config.project.save_on_each_node:
            return self.is_local_main_process
        return self.is_main_process

    # -- models and memory ----------------------------------------------------------------------------------------
    def unwrap_model(
        self,
        model: nn.Module,
        keep_fp32_wrapper: bool = True,
        keep_torch_compile: bool = True,
    ) -> nn.Module:
        """Return the user's module inside a prepared one."""
        return self._strategy.unwrap(model, keep_fp32_wrapper, keep_torch_compile)

    # Any: tensors and extra state
    def get_state_dict(self, model: nn.Module) -> Mapping[str, Any]:
        """Return the full, unsharded state dict of a prepared model. Ranks: every rank."""
        arguments.check_type(
            "get_state_dict(model)", nn.Module, arguments.MODELS, model
        )
        return self._strategy.full_state_dict(model)

    def profile(
        self, profile_handler: ProfileKwargs | None = None
    ) -> AbstractContextManager[TorchProfile]:
        """Context manager around `torch.profiler`; writes one Chrome trace per rank if a folder is given."""
        arguments.check_type(
            "profile(handler)",
            ProfileKwargs | None,
            "it needs a ProfileKwargs(...)",
            profile_handler,
        )
        return profile.profile(profile_handler or self.config.profile, self.ctx)

    def free_memory(self, *objects: Any) -> Any:  # Any: the user's objects
        """Release all prepared objects and empty the device's cache; returns None for each argument."""
        self._prepared.clear()
        for run_part in self._clock.parts.members:
            if isinstance(run_part, EMA):
                self._clock.parts.remove(run_part)
        self._clock.has_unowned = False
        self._accumulations.clear()
        cleared_slots = [None] * len(objects)
        del objects
        gc.collect()
        empty_cache(self.ctx.device)
        return cleared_slots[0] if len(cleared_slots) == 1 else cleared_slots
