"""DeepSpeedStrategy: one engine per trained model, behind the interface of all strategies."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from hasten import trees
from hasten.config.root import Config
from hasten.errors import ConfigError, PrepareError, StepError
from hasten.extensions.deepspeed import engine as deepspeed_engine
from hasten.extensions.deepspeed.config import EngineConfig, Facts, stage_of, translate
from hasten.extensions.deepspeed.config import building as partitioning
from hasten.extensions.deepspeed.engine import (
    RegisteredConfig,
    building,
    is_partitioned,
    make_whole,
)
from hasten.extensions.deepspeed.optimizer import DeepSpeedOptimizer
from hasten.extensions.deepspeed.placeholders import DummyScheduler
from hasten.extensions.deepspeed.settings import DeepSpeedPlugin
from hasten.extensions.deepspeed.shards import weight_slice
from hasten.optim.engine import Placeholder
from hasten.optim.gradients import drop_gradients
from hasten.optim.window import divided
from hasten.precision.base import Precision
from hasten.prepare_args import Item, PrepareArguments
from hasten.runtime.context import ProcessContext
from hasten.strategies.base import Caps, OfferedStrategy, PrepareRequest, Weigh
from hasten.strategies.native import make_optimizers
from hasten.strategies.placing import Convert, PlaceOnDevice
from hasten.trees import Tree

log = logging.getLogger(__name__)

_HALF_DTYPES: Final = MappingProxyType({"bf16": torch.bfloat16, "fp16": torch.float16})


@dataclass(slots=True)
class Engine:
    """An engine, its optimizer in the loop, and its configuration."""

    model: Any  # DeepSpeed's engine: an untyped nn.Module
    optimizer: DeepSpeedOptimizer
    made: EngineConfig
    linear: deepspeed_engine.Linear | None
    ran: bool = False
    """A forward with gradients has run since the last backward that reached this engine."""


class EvaluationMode:
    """Hooks that turn inference mode into no_grad during a forward.

    ZeRO-3 writes what it gathers into the parameters, and no backward can use parameters that were written in inference mode.
    """

    def __init__(self) -> None:
        self._entered: list[ExitStack] = []

    def enter(self, *_: object) -> None:
        modes = ExitStack()
        if torch.is_inference_mode_enabled():
            modes.enter_context(torch.inference_mode(False))
            modes.enter_context(torch.no_grad())
        self._entered.append(modes)

    def leave(self, *_: object) -> None:
        if self._entered:  # another hook may have raised before enter() was called
            self._entered.pop().close()


class DeepSpeedStrategy:
    """Strategy that trains each model in a DeepSpeed engine; models without an optimizer are placed and left whole."""

    name = "deepspeed"

    def __init__(self, config: Config, ctx: ProcessContext) -> None:
        deepspeed_engine.package()
        plugin = config.section(DeepSpeedPlugin)
        if config.gradient_accumulation.sync_each_batch:
            raise ConfigError(
                "gradient_accumulation.sync_each_batch=True is not supported under DeepSpeed, where the ZeRO stage determines when "
                "gradients are exchanged; remove it."
            )
        self._config, self._plugin = config, plugin
        self._place, self._convert = PlaceOnDevice(), Convert(config.master_weights)
        self.caps = Caps(
            owns_precision=True,
            sharded_state=True,
            synchronises=False,
            hides_gradients=True,
        )
        self.engines: list[Engine] = []
        """Engines in the order in which they were prepared."""
        self._replaced_optimizers: dict[
            int, tuple[Optimizer, DeepSpeedOptimizer]
        ] = {}  # by id of the script's optimizer
        self._registered_config: RegisteredConfig | None = None
        if plugin.zero3_init_flag:
            self._registered_config = RegisteredConfig(
                partitioning(plugin, config.mixed_precision)
            )
            # transformers starts to partition models right away
            deepspeed_engine.join(ctx)

    def building(self, ctx: ProcessContext) -> AbstractContextManager[None]:
        if stage_of(self._plugin) != 3:
            return nullcontext()
        return building(partitioning(self._plugin, self._config.mixed_precision), ctx)

    # -- preparing ------------------------------------------------------------------------------------------------
    def prepare(
        self,
        bundle: PrepareArguments,
        ctx: ProcessContext,
        precision: Precision,
        train: bool = True,
    ) -> None:
        models = bundle.of("model")
        make_optimizers(
            bundle.of("optimizer"), [item.value for item in models], placeholders=True
        )
        optimizer_of_model = _owners(models, bundle.of("optimizer"))
        for item in models:
            optimizer = optimizer_of_model.get(id(item))
            if optimizer is None or not train:
                if is_partitioned(item.value):
                    make_whole(
                        item.value, deepspeed_engine.package().zero.GatheredParameters
                    )
                request = PrepareRequest(place=item.place, train=False)
                placed_model = self._place.apply(item.value, request, ctx, precision)
                item.value = self._convert.apply(placed_model, request, ctx, precision)
            else:
                self._start_engine(item, optimizer, bundle, ctx)
        for item in bundle.of("scheduler"):
            item.value = self._rebind_scheduler(item.value)

    def _start_engine(
        self, item: Item, optimizer: Item, bundle: PrepareArguments, ctx: ProcessContext
    ) -> None:
        model: nn.Module = item.value
        user_optimizer: Optimizer = optimizer.value
        if user_optimizer.state:
            raise PrepareError(
                f"{type(user_optimizer).__name__} has state of earlier steps, which the engine's partitions would not have. Prepare a "
                "new optimizer, and load the state with load_state()."
            )
        engine_config = translate(
            self._plugin, self._facts_of_run(model, user_optimizer, bundle, ctx)
        )
        if ctx.is_main:
            for note in engine_config.notes:
                log.info("deepspeed: %s", note)
        groups = [
            dict(group) for group in user_optimizer.param_groups if group["params"]
        ]
        engine, linear = deepspeed_engine.start(
            model, user_optimizer, engine_config, self._plugin, ctx
        )
        if ctx.device.type != "cpu":
            # DeepSpeed does not move the buffers of a model that was built partitioned
            for buffer in model.buffers():
                buffer.data = buffer.to(ctx.device)
        engine_optimizer = DeepSpeedOptimizer(engine, groups, engine_config)
        add_schedule_to_checkpoints(engine_optimizer)
        if isinstance(user_optimizer, Placeholder):
            engine_optimizer.take_options()
        prepared_engine = Engine(engine, engine_optimizer, engine_config, linear)
        if engine_config.stage == 3:
            _show_slices(model.parameters(), True)
        self._add_hooks(prepared_engine)
        self.engines.append(prepared_engine)
        self._replaced_optimizers[id(user_optimizer)] = user_optimizer, engine_optimizer
        item.value, optimizer.value = engine, engine_optimizer

    def _facts_of_run(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        bundle: PrepareArguments,
        ctx: ProcessContext,
    ) -> Facts:
        batch_sizes = [
            size
            for item in bundle.of("loader")
            if (size := getattr(item.value, "batch_size", None))
        ]
        choose_size = min if self._plugin.is_train_batch_min else max
        dummy_schedulers = [
            item.value
            for item in bundle.of("scheduler")
            if isinstance(item.value, DummyScheduler)
        ]
        return Facts(
            mixed_precision=self._config.mixed_precision,
            accumulation=self._config.gradient_accumulation.num_steps,
            world_size=ctx.world.size,
            micro_batch=choose_size(batch_sizes) if batch_sizes else None,
            hidden_size=_hidden_size(model),
            optimizer=optimizer.options if isinstance(optimizer, Placeholder) else None,
            scheduler=dummy_schedulers[0].options if dummy_schedulers else None,
            on_cpu=ctx.device.type == "cpu",
        )

    def _add_hooks(self, watched: Engine) -> None:
        """Register hooks that cast inputs and outputs as autocast would, and record which engines a loss may come from."""
        dtype = _HALF_DTYPES.get(self._config.mixed_precision)
        keeps_outputs = self._config.autocast.output_dtype == "keep"

        # Any: the model's arguments
        def cast_inputs(_: nn.Module, args: Any, kwargs: Any) -> Any:
            watched.ran = watched.ran or torch.is_grad_enabled()
            watched.optimizer.refresh()
            return None if dtype is None else _cast((args, kwargs), dtype)

        def cast_outputs(_: nn.Module, args: Any, outputs: Any) -> Any:
            return outputs if dtype is None or keeps_outputs else trees.to_fp32(outputs)

        watched.model.register_forward_pre_hook(cast_inputs, with_kwargs=True)
        watched.model.register_forward_hook(cast_outputs)
        evaluation = EvaluationMode()
        watched.model.register_forward_pre_hook(evaluation.enter, prepend=True)
        watched.model.register_forward_hook(evaluation.leave, always_call=True)
        if watched.linear is not None:
            watched.model.register_forward_pre_hook(watched.linear.enter, prepend=True)
            watched.model.register_forward_hook(watched.linear.leave, always_call=True)

    # Any: schedulers share no base class
    def _rebind_scheduler(self, scheduler: Any) -> Any:
        """Return the scheduler, changed to update the groups of the engine's optimizer."""
        replacement = self._replaced_optimizers.get(
            id(getattr(scheduler, "optimizer", None))
        )
        if replacement is None:
            return scheduler
        prepared = replacement[1]
        if not isinstance(scheduler, DummyScheduler):
            scheduler.optimizer = prepared
        elif scheduler.lr_scheduler_callable is not None:
            scheduler = scheduler.lr_scheduler_callable(prepared)
        else:
            scheduler = self._take_engine_scheduler(prepared)
        prepared.schedule = prepared.schedule or scheduler
        return scheduler

    # Any: DeepSpeed is untyped
    def _take_engine_scheduler(self, prepared: DeepSpeedOptimizer) -> Any:
        engine = prepared.engine
        # the loop steps it, like any scheduler
        engine_scheduler, engine.lr_scheduler = engine.lr_scheduler, None
        if engine_scheduler is None:
            raise PrepareError(
                "a DummyScheduler was prepared, but DeepSpeed's configuration has no scheduler section, so no scheduler can be created. "
                'Add {"scheduler": {"type": "WarmupLR", "params": {...}}}, or prepare a real scheduler.'
            )
        engine_scheduler.optimizer = prepared
        prepared.take_options()
        show_rates(engine_scheduler, prepared)
        return engine_scheduler

    # -- one step -------------------------------------------------------------------------------------------------
    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        return nullcontext()  # the end of a window reaches the engine with its step

    # Any: torch's keywords
    def backward(self, loss: Tensor, parts: int = 1, **kwargs: Any) -> None:
        passes_before = [engine.optimizer.num_passes for engine in self.engines]
        loss, scale = divided(loss, parts), self._scale()
        with ExitStack() as stack:
            for engine in self.engines:
                stack.enter_context(engine.optimizer.in_backward())
                if engine.linear is not None:
                    # for recomputed blocks
                    stack.enter_context(engine.linear.in_place())
            (loss if scale == 1.0 else loss * scale).backward(**kwargs)  # type: ignore[no-untyped-call]
        for engine, passes in zip(self.engines, passes_before, strict=True):
            if engine.optimizer.num_passes != passes:
                engine.ran = False

    def forward_backward(
        self,
        model: nn.Module,
        batch: Tree,
        loss_of: Callable[[nn.Module, Tree], Tensor],
        weigh: Weigh,
        weight: Callable[[Tree], float | Tensor] | None = None,
    ) -> Tensor:
        loss = loss_of(model, batch)
        self.backward(weigh(loss, None if weight is None else weight(batch)))
        return loss.detach()

    def _scale(self) -> float:
        """Return the loss scale of the engines that this loss may come from."""
        scales = {
            engine.optimizer.loss_scale for engine in self.engines if engine.ran
        } or {engine.optimizer.loss_scale for engine in self.engines}
        if len(scales) > 1:
            raise StepError(
                f"backward() was called after the forward of several engines whose loss scales differ ({sorted(scales)}), so some "
                "gradients would have the wrong scale. Use mixed_precision='bf16', or call "
                "backward() after each engine's forward."
            )
        return scales.pop() if scales else 1.0

    def clip_norm(
        self, parameters: Sequence[Tensor], max_norm: float, norm_type: float
    ) -> Tensor:
        if norm_type != 2.0:
            raise StepError(
                f"clip_grad_norm_(norm_type={norm_type}) is not supported under deepspeed, whose engines clip to the 2-norm; remove "
                "norm_type."
            )
        return self._optimizer_of(parameters).clip(max_norm)

    def clip_value(self, parameters: Sequence[Tensor], limit: float) -> None:
        raise StepError(
            "clip_grad_value_() is not supported under deepspeed, whose engines hold gradients as flat partitions; use clip_grad_norm_()."
        )

    def _optimizer_of(self, parameters: Sequence[Tensor]) -> DeepSpeedOptimizer:
        """Return the optimizer of the engine that trains exactly these parameters. Raises: StepError if there is none."""
        clipped_ids = {id(parameter) for parameter in parameters}
        clipped_engines = [
            engine for engine in self.engines if clipped_ids & _held(engine)
        ]
        trained_ids = {
            parameter_id for engine in clipped_engines for parameter_id in _held(engine)
        }
        if len(clipped_engines) != 1 or not trained_ids <= clipped_ids:
            raise StepError(
                f"clip_grad_norm_() got {len(clipped_ids)} parameters, of {len(clipped_engines)} engines with {len(trained_ids)} parameters in all; an engine stores "
                "the gradients of all its parameters together, so they can only be clipped together. Call it once per model, with "
                "model.parameters()."
            )
        if num_unowned := sum(
            parameter.requires_grad and id(parameter) not in trained_ids
            for parameter in parameters
        ):
            raise StepError(
                f"clip_grad_norm_() got {num_unowned} trainable parameters that are in no optimizer. An engine has no gradients for them, whereas "
                "plain torch includes them in the norm. Call requires_grad_(False) on them, or give them to the optimizer."
            )
        return clipped_engines[0].optimizer

    # -- the user's module ----------------------------------------------------------------------------------------
    def _engine_of(self, model: nn.Module) -> Engine | None:
        return next((engine for engine in self.engines if engine.model is model), None)

    def unwrap(
        self, model: nn.Module, keep_precision: bool = True, keep_compile: bool = True
    ) -> nn.Module:
        if (one := self._engine_of(model)) is not None:
            module: nn.Module = one.model.module
            return module
        return model if keep_precision else self._convert.undo(model)

    # Any: tensors and extra state
    def full_state_dict(self, model: nn.Module) -> dict[str, Any]:
        one = self._engine_of(model)
        if one is None or one.made.stage < 3:
            return dict(self.unwrap(model).state_dict())
        one.optimizer.refresh()
        gather = deepspeed_engine.package().zero.GatheredParameters
        copies: dict[int, Tensor] = {}  # tied weights stay tied
        for value in one.model.module.state_dict(keep_vars=True).values():
            if hasattr(value, "ds_id") and id(value) not in copies:
                with gather([value]):
                    copies[id(value)] = value.detach().to("cpu", copy=True)
        state = one.model.module.state_dict(keep_vars=True)
        return {
            key: copies.get(
                id(value), value.detach() if isinstance(value, Tensor) else value
            )
            for key, value in state.items()
        }

    @contextmanager
    def whole_weights(self, model: nn.Module) -> Iterator[None]:
        one = self._engine_of(model)
        if one is None:
            yield
            return
        parameters = list(one.model.module.parameters())
        gather = deepspeed_engine.package().zero.GatheredParameters
        with ExitStack() as stack:
            if one.made.stage == 3:
                stack.enter_context(gather(parameters, modifier_rank=0))
                _show_slices(parameters, False)
                stack.callback(_show_slices, parameters, True)
            yield
        refresh = getattr(one.model.optimizer, "refresh_fp32_params", None)
        if callable(refresh):
            refresh()
            return
        with torch.no_grad():
            for models, masters in zip(
                getattr(one.model.optimizer, "fp16_groups", ()),
                getattr(one.model.optimizer, "fp32_groups", ()),
                strict=True,
            ):
                for parameter, master in zip(models, masters, strict=True):
                    master.copy_(parameter)

    def mark_forward_method(self, model: nn.Module, name: str) -> None:
        if self._engine_of(model) is not None:
            raise PrepareError(
                f"{name!r} cannot be marked under deepspeed: an engine gathers parameters only in the model's forward. Call the model, "
                "with an argument that selects the method."
            )

    def join(self, models: list[nn.Module]) -> AbstractContextManager[None]:
        raise StepError(
            "join_uneven_inputs() is not supported under deepspeed: every rank must take part in every collective. Use "
            "even_batches=True (the default), which gives every rank the same number of batches."
        )

    # -- for checkpoints ------------------------------------------------------------------------------------------
    def drop_gradients(self, model: nn.Module) -> None:
        drop_gradients(model)


def add_schedule_to_checkpoints(optimizer: DeepSpeedOptimizer) -> None:
    """Include the loop's options and schedule in the engine's checkpoints, and restore them at a load."""
    engine = optimizer.engine
    save, load = engine.save_checkpoint, engine.load_checkpoint

    @functools.wraps(save)
    def save_with_schedule(*args: Any, **kwargs: Any) -> Any:
        optimizer.give_options()
        with _loop_schedule(optimizer):
            return save(*args, **kwargs)

    @functools.wraps(load)
    def load_with_schedule(*args: Any, **kwargs: Any) -> Any:
        optimizer.zero_grad()  # gradients of the previous weights
        with _loop_schedule(optimizer):
            load_path = load(*args, **kwargs)
        optimizer.take_options()
        schedule = optimizer.schedule
        if schedule is not None and not isinstance(schedule, LRScheduler):
            show_rates(schedule, optimizer)
        return load_path

    engine.save_checkpoint = save_with_schedule
    engine.load_checkpoint = load_with_schedule


def show_rates(scheduler: Any, optimizer: DeepSpeedOptimizer) -> None:
    """Make `get_last_lr()` of a DeepSpeed scheduler return the rates in use, also before its first step."""
    scheduler._last_lr = [group["lr"] for group in optimizer.param_groups]


@contextmanager
def _loop_schedule(optimizer: DeepSpeedOptimizer) -> Iterator[None]:
    """Context manager in which the engine saves and loads the loop's schedule, which it does not step."""
    engine = optimizer.engine
    engine_schedule = engine.lr_scheduler
    engine.lr_scheduler = optimizer.schedule
    try:
        yield
    finally:
        engine.lr_scheduler = engine_schedule


def _show_slices(parameters: Iterable[Any], shown: bool) -> None:
    """Make checkpoints store each ZeRO-3 parameter as this rank's slice, or as the whole tensor while it is gathered."""
    for parameter in parameters:
        parameter.stored_slice = weight_slice if shown else None


def _held(one: Engine) -> set[int]:
    return {id(p) for group in one.optimizer.param_groups for p in group["params"]}


def _owners(models: list[Item], optimizers: list[Item]) -> dict[int, Item]:
    """Return the optimizer of each model, by the id of the model's item.

    Raises: PrepareError unless each optimizer belongs to exactly one model.
    """
    found: dict[int, Item] = {}
    for optimizer in optimizers:
        params = {
            id(p) for group in optimizer.value.param_groups for p in group["params"]
        }
        name = type(optimizer.value).__name__
        owners = [
            item for item in models if params & {id(p) for p in item.value.parameters()}
        ]
        known = {id(p) for item in owners for p in item.value.parameters()}
        if len(owners) != 1 or not params <= known or id(owners[0]) in found:
            shared = bool(owners) and id(owners[0]) in found
            raise PrepareError(
                f"{name} has parameters of {len(owners)} of the {len(models)} models in this prepare()"
                f"{', one of which has another optimizer' if shared else ''}; a DeepSpeed engine trains one model with one optimizer. "
                "Prepare each model together with an optimizer over its own parameters."
            )
        found[id(owners[0])] = optimizer
    return found


def _hidden_size(model: nn.Module) -> int | None:
    config = getattr(model, "config", None)
    for holder in (config, getattr(config, "text_config", None)):
        if isinstance(size := getattr(holder, "hidden_size", None), int):
            return size
        if sizes := getattr(holder, "hidden_sizes", None):
            return int(max(sizes))
    return None


def _cast(tree: Any, dtype: torch.dtype) -> Any:  # Any: the model's arguments
    return trees.map_tensors(
        lambda x: x.to(dtype) if x.is_floating_point() else x, tree
    )


STRATEGY: Final = OfferedStrategy(create=DeepSpeedStrategy)
