"""The Accelerator: the one object a training script talks to. It delegates; it decides nothing.

Longer than other files because every public method stands here once, with its help text, and none can go elsewhere.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeVar, Unpack, overload

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.profiler import profile as TorchProfile  # a class torch spells in lower case

from hasten.accelerator import arguments, metrics, profile
from hasten.accelerator.accumulation import Accumulation
from hasten.accelerator.preparing import Preparer
from hasten.accelerator.process import Process
from hasten.accelerator.randomness import Randomness
from hasten.accelerator.recording import Noted
from hasten.accelerator.retrying import Retrying, Split
from hasten.accelerator.run_state import RunParts
from hasten.accelerator.saving import HookHandle, LoadHook, SaveHook, Saving
from hasten.accelerator.setup import Parts, build
from hasten.checkpoint import export
from hasten.checkpoint.model_state import LoadReport
from hasten.checkpoint.weights import load_weights
from hasten.comm import ops
from hasten.comm.agreement import agree
from hasten.comm.base import Comm, ReduceKind
from hasten.config.keywords import Keywords
from hasten.config.precision import AutocastKwargs
from hasten.config.root import Config
from hasten.config.tracking import ProfileKwargs
from hasten.data.loader import Loader
from hasten.data.skip import skip_first_batches
from hasten.debug.watchdog import watch
from hasten.errors import PrepareError, StepError
from hasten.optim import clip
from hasten.optim.clock import check_every
from hasten.optim.optimizer import PreparedOptimizer, settle
from hasten.optim.scheduler import PreparedScheduler
from hasten.optim.weightless import zero_if_weightless
from hasten.runtime.axes import BATCH, Axis
from hasten.runtime.context import ProcessContext
from hasten.runtime.devices import empty_cache
from hasten.strategies.context import ContextParallel, SequenceShards
from hasten.tracking.base import Tracker
from hasten.trees import Tree

if TYPE_CHECKING:
    from hasten.progress.bar import Progress
    from hasten.progress.build import ProgressMaker

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


class Accelerator:
    """Runs a plain training loop on any number of processes and devices.

    ```python
    accelerator = Accelerator()
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for x, y in loader:
        loss = loss_fn(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    ```
    Settings given here win over flags, environment and files. Ranks: every rank makes one, with the same settings.
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
        kwargs_handlers: Sequence[Any] | None = None,  # Any: one of several settings classes
        context: ProcessContext | None = None,
        **settings: Unpack[Keywords],
    ) -> None:
        given = {
            "mixed_precision": mixed_precision,
            "gradient_accumulation_steps": gradient_accumulation_steps,
            "cpu": cpu,
            "device_placement": device_placement,
            "strategy": strategy,
            "project_dir": project_dir,
            "log_with": log_with,
            "kwargs_handlers": kwargs_handlers,
            **settings,
        }
        parts: Parts = build(given, context)
        self.config: Config = parts.config
        self.ctx = parts.ctx
        self.process = Process(parts.ctx)
        self.clock = parts.clock
        self.strategy = parts.strategy
        self.precision = parts.precision
        self.tracking = parts.tracking
        self.run_log = parts.run_log
        self._progress: ProgressMaker | None = None
        self._preparer = Preparer(parts.config, parts.ctx, parts.strategy, parts.precision, parts.clock)
        self.prepared = self._preparer.done
        sizes = parts.config.parallelism
        self._context = ContextParallel(sizes.cp_handler, parts.ctx, parts.clock, lambda: self.prepared.models)
        self.retrying = Retrying(
            parts.ctx, parts.strategy, parts.clock, lambda: self.prepared.models, lambda: self.prepared.optimizers
        )
        self._accumulations: dict[tuple[nn.Module, ...], Accumulation] = {}
        self.saving = Saving(
            parts.ctx,
            parts.config.project,
            RunParts(
                self.prepared,
                parts.strategy.unwrap,
                parts.clock,
                parts.precision,
                Randomness(parts.ctx.device),
                parts.tracking,
                parts.strategy,
            ),
            notes={"strategy": parts.strategy.name, "mixed_precision": parts.config.mixed_precision},
            whole=parts.config.fsdp.state_dict_type == "FULL_STATE_DICT",
        )
        watch(self, parts.watchdog)

    # -- this process among the others ----------------------------------------------------------------------------
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
        """Whether this is rank 0 of the world."""
        return self.process.is_main_process

    @property
    def is_local_main_process(self) -> bool:
        """Whether this is rank 0 of its node."""
        return self.process.is_local_main_process

    @property
    def is_last_process(self) -> bool:
        """Whether this is the last rank of the world."""
        return self.process.is_last_process

    @property
    def use_distributed(self) -> bool:
        """Whether there is more than one process."""
        return self.process.num_processes > 1

    @property
    def mixed_precision(self) -> str:
        """The precision of this run: no, bf16, fp16 or fp8."""
        return self.precision.spec

    @property
    def project_dir(self) -> str | None:
        """The folder of this run."""
        return self.config.project.project_dir

    @property
    def comm(self) -> Comm:
        """The world's communicator."""
        return self.ctx.world

    def wait_for_everyone(self) -> None:
        """Wait until every process is here. Ranks: every rank."""
        self.process.wait_for_everyone()

    def print(self, *args: Any, **kwargs: Any) -> None:  # Any: print's own arguments
        """Print once per node."""
        self.process.print(*args, **kwargs)

    def main_process_first(self) -> AbstractContextManager[None]:
        """Run the block on the main process, then on the others; an error on any rank is raised on all."""
        return self.process.main_process_first()

    def local_main_process_first(self) -> AbstractContextManager[None]:
        """Run the block on each node's main process, then on the others; an error on any rank is raised on all."""
        return self.process.local_main_process_first()

    def on_main_process(self, function: Callable[P, R]) -> Callable[P, R | None]:
        """The function, run on the main process only."""
        return self.process.on_main_process(function)

    def on_local_main_process(self, function: Callable[P, R]) -> Callable[P, R | None]:
        """The function, run on each node's main process only."""
        return self.process.on_local_main_process(function)

    def on_last_process(self, function: Callable[P, R]) -> Callable[P, R | None]:
        """The function, run on the last process only."""
        return self.process.on_last_process(function)

    def on_process(self, function: Callable[P, R] | None = None, process_index: int = 0) -> Any:
        """The function, run on one process only. Any: a function, or a decorator when called without one."""
        return self.process.on_process(function, process_index)

    def on_local_process(self, function: Callable[P, R] | None = None, local_process_index: int = 0) -> Any:
        """The function, run on one process of each node. Any: a function, or a decorator when called without one."""
        return self.process.on_local_process(function, local_process_index)

    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> AbstractContextManager[Any]:
        """This process's share of a list, tuple, dict of those, tensor or dataset. Any: the same kind comes back."""
        return self.process.split_between_processes(inputs, apply_padding)

    def set_trigger(self) -> None:
        """Raise the flag that `check_trigger` shows on every process. Ranks: any."""
        self.process.set_trigger()

    def check_trigger(self) -> bool:
        """Whether any process has set the trigger; it is lowered again. Ranks: every rank."""
        return self.process.check_trigger()

    # -- preparing ------------------------------------------------------------------------------------------------
    def prepare(self, *objects: Any, device_placement: Sequence[bool] | None = None) -> Any:
        """Models, optimizers, schedulers and loaders ready for this run, in the order given. Any: the user's objects.

        An optimizer may be a factory such as `partial(AdamW, lr=1e-3)`. One object comes back alone, several as a
        tuple. Ranks: every rank, with the same objects in the same order.
        """
        prepared = self._preparer.prepare(objects, device_placement)
        return prepared[0] if len(prepared) == 1 else prepared

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """The model, ready; in evaluation mode placed, cast and compiled, but not spread for training."""
        placement = None if device_placement is None else [device_placement]
        prepared: nn.Module = self._preparer.prepare((model,), placement, train=not evaluation_mode)[0]
        return prepared

    def prepare_optimizer(self, optimizer: Optimizer, device_placement: bool | None = None) -> PreparedOptimizer:
        """The optimizer of a prepared model, following the step clock; its state lives where the parameters are."""
        if device_placement is False:
            raise PrepareError(
                "prepare_optimizer(device_placement=False) asks for optimizer state apart from its parameters, which torch does "
                "not have; give device_placement=False to prepare_model, and the state follows."
            )
        prepared: PreparedOptimizer = self._preparer.prepare((optimizer,))[0]
        return prepared

    def prepare_scheduler(self, scheduler: Any) -> PreparedScheduler:  # Any: schedulers share no base class
        """The scheduler of a prepared optimizer, stepping once per update."""
        prepared: PreparedScheduler = self._preparer.prepare((scheduler,))[0]
        return prepared

    def prepare_data_loader(
        self, data_loader: Any, device_placement: bool | None = None, slice_fn_for_dispatch: Any = None
    ) -> Loader:
        """The loader, reading this process's share. Any: a DataLoader of any element, and the user's own slicing."""
        arguments.check_loader(data_loader, "prepare_data_loader(data_loader)")
        return self._preparer.prepare_loader(data_loader, device_placement, slice_fn_for_dispatch)

    def skip_first_batches(self, data_loader: Any, num_batches: int = 0) -> Any:  # Any: loaders of any element
        """The loader, beginning `num_batches` later in its current epoch."""
        arguments.check_loader(data_loader, "skip_first_batches(data_loader)")
        arguments.check_number(num_batches, "skip_first_batches(num_batches)")
        return skip_first_batches(data_loader, num_batches)

    # -- one step -------------------------------------------------------------------------------------------------
    def accumulate(self, *models: nn.Module, loader: Loader | None = None) -> Accumulation:
        """One micro-step over these models (all of them when none is named).

        Optimizers and schedulers act, and gradients are synchronised, only where the window ends. A window also ends
        with the epoch of `loader`, by default the one that moves first in each step of the loop.
        """
        arguments.check_modules(models, "accumulate(models)")
        self.clock.cursors.followed = None if loader is None else loader.cursor
        known = self._accumulations.get(models)
        if known is not None and not known.entered:
            return known
        key = tuple(self.prepared.index_of(model) for model in models)
        each = self.config.gradient_accumulation.sync_each_batch
        made = Accumulation(self.clock, self.strategy, models or tuple(self.prepared.models), key, each)
        if models:  # "all models" may be more next time
            self._accumulations[models] = made
        return made

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """A block in which backward leaves this model's gradients unsynchronised."""
        arguments.check_modules((model,), "no_sync(model)")
        return self.strategy.no_sync(model)

    @property
    def sync_gradients(self) -> bool:
        """Whether the current micro-step ends its window."""
        return self.clock.boundary

    @sync_gradients.setter
    def sync_gradients(self, value: bool) -> None:
        self.clock.force(value)

    @property
    def gradient_accumulation_steps(self) -> int:
        """Micro-steps per update; a change acts from the next window on."""
        return self.clock.every

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, value: int) -> None:
        check_every(value)
        self.clock.every = value

    def backward(self, loss: Tensor, weight: float | Tensor | None = None, **kwargs: Any) -> None:
        """Backpropagate the loss, weighed so that the window's gradient is the mean over the big batch.

        With `weight` (the tokens or samples the loss is the mean of), the mean is weighted over all micro-steps and
        ranks. Any: keywords of torch's backward.
        """
        if type(loss) is not Tensor:
            arguments.check_loss(loss)
        if self._progress is not None:
            self._progress.pulse.reached()
        if self.run_log is not None:
            self.run_log.backward_begins()
        weighed = self.precision.scale(self.clock.weigh(loss, weight))
        weight = self.clock.weight_of(weight)
        if weight is None:
            self.strategy.backward(weighed, **kwargs)
        else:
            with zero_if_weightless(loss, weight, self.clock.joined):
                self.strategy.backward(weighed, **kwargs)
        if self.run_log is not None:
            self.run_log.backward_done()

    def forward_backward(self, model: nn.Module, batch: Tree, loss_of: Callable[[nn.Module, Tree], Tensor]) -> Tensor:
        """Forward and backward of one batch; its loss, detached and the same on every pipeline stage.

        `loss_of(model, batch)` gives the mean loss over the samples, as in a plain loop. Under pipeline parallelism it is
        called for every micro-batch on every stage, and this replaces `backward`; elsewhere it is the same as calling
        `backward(loss_of(model, batch))`. Ranks: every rank.
        """
        arguments.check_modules((model,), "forward_backward(model)")
        arguments.check_callable(loss_of, "forward_backward(loss_of)")
        if self._progress is not None:
            self._progress.pulse.reached()
        return self.strategy.forward_backward(
            model, batch, loss_of, lambda loss: self.precision.scale(self.clock.weigh(loss))
        )

    def run_step(self, fn: Callable[[Any], R], batch: Tree, split: Split | None = None) -> R:
        """Call `fn(batch)`, which runs forward and `backward()`; when memory runs out on any rank, all run it again in parts.

        The gradients are those of the whole batch: the mean loss of a micro-batch counts by its rows, one with `weight=` by
        its weight. Micro-batches are rows of the tensors in the batch, or what `split(batch, start, stop)` gives. What `fn`
        returns is merged: rows are joined, float scalars averaged, whole numbers added. Any: a batch.
        Ranks: every rank. Raises: OutOfMemoryError on every rank when one sample does not fit on one of them.
        """
        arguments.check_callable(fn, "run_step(fn)")
        return self.retrying.run(fn, batch, split)

    def context_parallel(
        self,
        buffers: Sequence[Tensor],
        dims: Sequence[int],
        labels: Tensor | Literal["auto"] | None = "auto",
    ) -> AbstractContextManager[SequenceShards]:
        """A block in which each buffer holds this rank's part along its dimension, and attention spans all parts.

        Forward and backward belong inside; buffers are whole again after it. The loss weighs as much as this rank has
        labels other than -100: those of `labels`, by default the buffer that has any; None weighs ranks alike.
        """
        return self._context.block(buffers, dims, labels=labels)

    def maybe_context_parallel(
        self,
        buffers: Sequence[Tensor] | None = None,
        buffer_seq_dims: Sequence[int] | None = None,
        no_restore_buffers: Iterable[Tensor] | None = None,
    ) -> AbstractContextManager[SequenceShards]:
        """Like `context_parallel`, by the established name: losses of ranks weigh alike, named buffers stay parts."""
        return self._context.block(buffers or (), buffer_seq_dims or (), no_restore_buffers or (), labels=None)

    def autocast(self, autocast_handler: AutocastKwargs | None = None) -> AbstractContextManager[None]:
        """A block that computes in this run's precision, for code outside a prepared model."""
        arguments.check_kind(autocast_handler, AutocastKwargs, "autocast(autocast_handler)")
        return self.precision.forward_context(autocast_handler)

    def unscale_gradients(self, optimizer: Any = None) -> None:  # Any: one optimizer, several, or None for all
        """Bring gradients to their final size at the end of a window; harmless to repeat. Ranks: every rank."""
        if not self.clock.boundary:
            return
        chosen = self.prepared.optimizers if optimizer is None else optimizer
        for one in chosen if isinstance(chosen, (list, tuple)) else [chosen]:
            if not isinstance(one, PreparedOptimizer):
                arguments.refuse("unscale_gradients(optimizer)", one, "it needs optimizers that prepare() returned")
            one.settle()

    def clip_grad_norm_(
        self, parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2.0
    ) -> Tensor | None:
        """Clip gradients to a global norm at the end of a window and give the norm they had; None before the end.

        Ranks: every rank.
        """
        if not self.clock.boundary:
            return None
        chosen = self._to_clip(parameters, max_norm, "clip_grad_norm_")
        return self.strategy.clip_norm(chosen, max_norm, norm_type)

    def clip_grad_value_(self, parameters: Tensor | Iterable[Tensor], clip_value: float) -> None:
        """Clamp every gradient element to [-clip_value, clip_value] at the end of a window. Ranks: every rank."""
        if not self.strategy.caps.clips_by_value:
            raise StepError(
                f"clip_grad_value_() is not possible under {self.strategy.name}, which keeps gradients where they "
                "cannot be clamped one by one; use clip_grad_norm_()."
            )
        if not self.clock.boundary:
            return
        clip.clip_value(self._to_clip(parameters, clip_value, "clip_grad_value_"), clip_value)

    def _to_clip(self, parameters: Tensor | Iterable[Tensor], limit: float, call: str) -> list[Tensor]:
        """The parameters, checked, with their gradients unscaled."""
        arguments.check_number(limit, f"{call}(…, limit)")
        arguments.check_iterable(parameters, f"{call}(parameters)", "it needs parameters. Give model.parameters()")
        chosen = clip.as_list(parameters)
        arguments.check_parameters(chosen, f"{call}(parameters)")
        settle(chosen, self.prepared.optimizers)
        return chosen

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """The loss scaler under fp16, else None."""
        return self.precision.scaler

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether any optimizer's latest step was skipped because gradients overflowed."""
        return any(optimizer.step_was_skipped for optimizer in self.prepared.optimizers)

    def join_uneven_inputs(
        self, joinables: Sequence[Any], even_batches: bool | None = None
    ) -> AbstractContextManager[None]:  # Any: prepared models and optimizers
        """A block in which processes may run out of batches at different times."""
        need = "it needs a list of prepared models and optimizers"
        arguments.check_iterable(joinables, "join_uneven_inputs(joinables)", need)
        return self._preparer.join(joinables, even_batches)

    def mark_forward_method(self, model: nn.Module, name: str) -> None:
        """Make calls of `model.name(...)` synchronise gradients like calls of the model itself."""
        self.strategy.mark_forward_method(model, name)

    # -- collectives ----------------------------------------------------------------------------------------------
    def gather(self, tensor: Tree, axes: Sequence[Axis] | None = None) -> Tree:
        """Every process's tensors joined along the first dimension, over the world or some mesh axes."""
        return ops.gather(tensor, self._over(axes))

    def reduce(
        self, tensor: Tree, reduction: ReduceKind = "sum", scale: float = 1.0, axes: Sequence[Axis] | None = None
    ) -> Tree:
        """Tensors summed, averaged, or their min or max taken over processes, times `scale`."""
        return ops.reduce(tensor, self._over(axes), reduction, scale)

    def gather_ragged(self, tensor: Tree, axes: Sequence[Axis] | None = None) -> Tree:
        """Like `gather`, for processes whose tensors differ in their number of rows."""
        return ops.gather_ragged(tensor, self._over(axes))

    def broadcast(self, tensor: Tree, from_process: int = 0, axes: Sequence[Axis] | None = None) -> Tree:
        """The tensors of one process."""
        return ops.broadcast(tensor, self._over(axes), from_process)

    def scatter(self, parts: Sequence[Tree] | None, from_process: int = 0, axes: Sequence[Axis] | None = None) -> Tree:
        """This process's tree of the list that one process gives; the others pass None."""
        return ops.scatter(parts, self._over(axes), from_process)

    def pad_across_processes(
        self,
        tensor: Tree,
        dim: int = 0,
        pad_index: float = 0,
        pad_first: bool = False,
        axes: Sequence[Axis] | None = None,
    ) -> Tree:
        """Tensors padded along `dim` to the largest size any process has."""
        return ops.pad_across(tensor, self._over(axes), dim, pad_index, pad_first)

    def gather_object(self, obj: Any, axes: Sequence[Axis] | None = None) -> list[Any]:  # Any: the user's objects
        """Every process's object in a list; when every process gives a list, those lists joined."""
        return ops.gather_object(obj, self._over(axes))

    def broadcast_object_list(
        self, objects: list[Any], from_process: int = 0, axes: Sequence[Axis] | None = None
    ) -> list[Any]:  # Any: the user's objects
        """The list, its items replaced in place by those of one process."""
        return ops.broadcast_object_list(objects, self._over(axes), from_process)

    def gather_for_metrics(
        self, input_data: Any, use_gather_object: bool = False, loader: Loader | None = None
    ) -> Any:  # Any: tensors or objects
        """The results of every process for the current batch, each real sample once.

        `loader` says whose batch it is when several loaders are iterated beside each other.
        """
        cursor = self.clock.cursors.only() if loader is None else loader.cursor
        return metrics.gather_for_metrics(input_data, self.ctx.groups(*BATCH), cursor, use_gather_object)

    def _over(self, axes: Sequence[Axis] | None) -> Comm:
        if axes is None:
            return self.ctx.world
        arguments.check_iterable(
            axes, "gather(axes) and other collectives", "it needs a list of mesh axes, such as [Axis.TP]"
        )
        return self.ctx.groups(*axes)

    # -- what users look at ---------------------------------------------------------------------------------------
    def init_trackers(
        self, project_name: str, config: Any = None, init_kwargs: Mapping[str, Mapping[str, Any]] | None = None
    ) -> None:
        """Begin a run of every tracker. Any: a mapping, namespace or dataclass of settings. Ranks: every rank."""
        self.tracking.init(project_name, config, init_kwargs)

    def log(
        self,
        values: Mapping[str, Any],
        step: int | None = None,
        log_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Record numbers and strings with every tracker; tensors are read later, without a device sync. Ranks: any."""
        self.tracking.log(values, step, log_kwargs)

    def log_images(
        self,
        values: Mapping[str, Any],
        step: int | None = None,
        log_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Record images with every tracker that takes them. Any: arrays, tensors, PIL images. Ranks: any."""
        self.tracking.log_images(values, step, log_kwargs)

    def log_table(self, name: str, **table: Any) -> None:
        """Record a table: `columns` and `data`, or a `dataframe`; `step`, `log_kwargs`. Any: cells. Ranks: any."""
        self.tracking.log_table(name, **table)

    @property
    def trackers(self) -> list[Tracker]:
        """The trackers that run on this process."""
        return self.tracking.trackers

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:  # Any: with unwrap, a foreign package's object
        """The tracker of this name, or its package's own object."""
        return self.tracking.get(name, unwrap)

    def end_training(self) -> None:
        """Finish saves in flight and close the trackers. Ranks: every rank."""
        self.saving.close()
        self.tracking.finish()
        if self.run_log is not None:
            self.run_log.close()

    @overload
    def progress(self, iterable: Iterable[T], **options: Any) -> Progress[T]: ...
    @overload
    def progress(self, iterable: None = None, **options: Any) -> Progress[Any]: ...
    def progress(self, iterable: Iterable[T] | None = None, **options: Any) -> Progress[T]:
        """A progress bar with loss, rates, memory and time left, on the main process. Any: see docs/tracking.md."""
        if self._progress is None:
            build = import_module("hasten.progress.build")  # loads rich, which a run without a bar does without
            self._progress = build.ProgressMaker(self.ctx)
        return self._progress(iterable, **options)

    # -- checkpoints ----------------------------------------------------------------------------------------------
    def save_state(
        self,
        output_dir: str | Path | None = None,
        safe_serialization: bool = True,
        blocking: bool = True,
        metrics: Mapping[str, float] | None = None,
    ) -> str:
        """Save everything the run needs to go on, atomically; where it lies. Ranks: every rank.

        Without a folder, checkpoints are numbered under `project_dir/checkpoints`. With `blocking=False` training
        goes on while it is written. `metrics` rank checkpoints for `keep_best`.
        """
        with Noted(self.run_log, "saved"):
            return self.saving.save_state(output_dir, safe_serialization, blocking, metrics)

    def load_state(
        self, input_dir: str | Path | None = None, strict: bool = True, allow_pickle: bool = False
    ) -> list[LoadReport]:
        """Put the run back to where a checkpoint was saved, by default the newest complete one. Ranks: every rank."""
        with Noted(self.run_log, "loaded"):
            return self.saving.load_state(input_dir, strict, allow_pickle)

    def wait_for_saves(self) -> None:
        """Return when no save is in flight; an error of one is raised here. Ranks: every rank."""
        self.saving.wait_for_saves()

    def register_for_checkpointing(self, *objects: Any) -> None:  # Any: objects with state_dict and load_state_dict
        """Save and load these objects with the run."""
        self.saving.register_for_checkpointing(*objects)

    def register_save_state_pre_hook(self, hook: SaveHook) -> HookHandle:
        """Call `hook(models, weights, folder)` before each save; it may edit what is written."""
        arguments.check_callable(hook, "register_save_state_pre_hook(hook)")
        return self.saving.register_save_state_pre_hook(hook)

    def register_load_state_pre_hook(self, hook: LoadHook) -> HookHandle:
        """Call `hook(models, folder)` before each load; models it removes from the list are left to it."""
        arguments.check_callable(hook, "register_load_state_pre_hook(hook)")
        return self.saving.register_load_state_pre_hook(hook)

    @property
    def preempted(self) -> bool:
        """Whether any rank was told to stop by SIGTERM or SIGUSR1. Ranks: every rank, once per step."""
        return self.saving.preempted

    should_stop = preempted

    def save_model(
        self,
        model: nn.Module,
        save_directory: str | Path,
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Write a prepared model's weights in the layout of the Hub. Ranks: every rank."""
        arguments.check_model(model, "save_model(model)")
        state = self.get_state_dict(model)
        with agree(self.ctx.world, "save_model"):
            if self._writes:
                export.save_model(state, save_directory, max_shard_size, safe_serialization)

    def load_model(self, model: nn.Module, directory: str | Path, strict: bool = True) -> LoadReport:
        """Fill a prepared model from exported weights; each rank reads only the slices it holds. Ranks: every rank."""
        with agree(self.ctx.world, "load_model"), self.strategy.whole_weights(model):
            return load_weights(self.strategy.unwrap(model), directory, strict)

    def save(self, obj: Any, f: str | Path, safe_serialization: bool = False) -> None:  # Any: the user's object
        """Write an object to a file, at once and on the main process only. Ranks: any."""
        if self._writes:
            export.save_object(obj, f, safe_serialization)

    def load(self, f: str | Path, allow_pickle: bool = False) -> Any:  # Any: the user's object
        """The object that `save` wrote, its tensors on the CPU; a `.safetensors` file gives a dict of tensors. Ranks: any.

        Raises: UnsafeCheckpointError for a file that runs code when it is unpickled, unless `allow_pickle`.
        """
        return export.load_object(f, allow_pickle)

    @property
    def _writes(self) -> bool:
        return self.is_local_main_process if self.config.project.save_on_each_node else self.is_main_process

    # -- models and memory ----------------------------------------------------------------------------------------
    def unwrap_model(
        self, model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
    ) -> nn.Module:
        """The user's own module inside a prepared one."""
        return self.strategy.unwrap(model, keep_fp32_wrapper, keep_torch_compile)

    def get_state_dict(self, model: nn.Module) -> Mapping[str, Any]:  # Any: tensors and extra state
        """Every parameter and buffer of a prepared model, whole. Ranks: every rank."""
        arguments.check_model(model, "get_state_dict(model)")
        return self.strategy.full_state_dict(model)

    def profile(self, profile_handler: ProfileKwargs | None = None) -> AbstractContextManager[TorchProfile]:
        """A block under torch.profiler, leaving one Chrome trace per rank when a folder is given."""
        arguments.check_kind(profile_handler, ProfileKwargs, "profile(profile_handler)")
        return profile.profile(profile_handler or self.config.profile, self.ctx)

    def free_memory(self, *objects: Any) -> Any:  # Any: the user's objects
        """Forget everything prepared and hand cached device memory back; the arguments come back as None."""
        self.prepared.clear()
        self._accumulations.clear()
        cleared = [None] * len(objects)
        del objects
        gc.collect()
        empty_cache(self.device)
        return cleared[0] if len(cleared) == 1 else cleared

    clear = free_memory
