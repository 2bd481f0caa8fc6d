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
from hasten.extensions.deepspeed.config import (
    EngineConfig,
    RunFacts,
    make_engine_config,
    stage_of,
)
from hasten.extensions.deepspeed.config import make_building_config as partitioning
from hasten.extensions.deepspeed.engine import (
    RegisteredConfig,
    is_partitioned,
    make_whole,
    partition_while_building,
)
from hasten.extensions.deepspeed.optimizer import DeepSpeedOptimizer
from hasten.extensions.deepspeed.placeholders import DummyScheduler
from hasten.extensions.deepspeed.settings import DeepSpeedPlugin
from hasten.extensions.deepspeed.shards import weight_slice
from hasten.optim.engine import Placeholder, list_parameters
from hasten.optim.gradients import drop_gradients
from hasten.optim.window import divide_loss
from hasten.precision.base import Precision
from hasten.prepare_args import Item, PrepareArguments
from hasten.runtime.context import ProcessContext
from hasten.strategies.base import Caps, OfferedStrategy, PrepareRequest, Weigh
from hasten.strategies.native import Convert, PlaceOnDevice, make_optimizers
from hasten.trees import Tree

log = logging.getLogger(__name__)

_HALF_DTYPES: Final = MappingProxyType({"bf16": torch.bfloat16, "fp16": torch.float16})


@dataclass(slots=True)
class Engine:
    """An engine, its optimizer in the loop, and its configuration."""

    model: Any  # DeepSpeed's engine: an untyped nn.Module
    optimizer: DeepSpeedOptimizer
    made: EngineConfig
    linear: deepspeed_engine.LinearSwitch | None
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
        deepspeed_engine.import_deepspeed()
        plugin = config.section(DeepSpeedPlugin)
        if config.gradient_accumulation.sync_each_batch:
            raise ConfigError(
                "gradient_accumulation.sync_each_batch=True is not supported under DeepSpeed, where the ZeRO stage determines when "
                "gradients are exchanged; remove it."
            )
        self._config = config
        self._plugin = plugin
        self._place = PlaceOnDevice()
        self._convert = Convert(config.master_weights)
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
            deepspeed_engine.join_process_group(ctx)

    def building(self, ctx: ProcessContext) -> AbstractContextManager[None]:
        if stage_of(self._plugin) != 3:
            return nullcontext()
        return partition_while_building(
            partitioning(self._plugin, self._config.mixed_precision), ctx
        )

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
        optimizer_of_model = _match_optimizers(models, bundle.of("optimizer"))
        for item in models:
            optimizer = optimizer_of_model.get(id(item))
            if optimizer is None or not train:
                if is_partitioned(item.value):
                    make_whole(
                        item.value,
                        deepspeed_engine.import_deepspeed().zero.GatheredParameters,
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
        engine_config = make_engine_config(
            self._plugin, self._facts_of_run(model, user_optimizer, bundle, ctx)
        )
        if ctx.is_main:
            for config_note in engine_config.notes:
                log.info("deepspeed: %s", config_note)
        parameter_groups = []
        for group in user_optimizer.param_groups:
            if group["params"]:
                parameter_groups.append(dict(group))
        engine, linear_switch = deepspeed_engine.start_engine(
            model, user_optimizer, engine_config, self._plugin, ctx
        )
        if ctx.device.type != "cpu":
            # DeepSpeed does not move the buffers of a model that was built partitioned
            for buffer in model.buffers():
                buffer.data = buffer.to(ctx.device)
        engine_optimizer = DeepSpeedOptimizer(engine, parameter_groups, engine_config)
        add_schedule_to_checkpoints(engine_optimizer)
        if isinstance(user_optimizer, Placeholder):
            engine_optimizer.take_options()
        prepared_engine = Engine(engine, engine_optimizer, engine_config, linear_switch)
        if engine_config.stage == 3:
            _show_slices(model.parameters(), True)
        self._add_hooks(prepared_engine)
        self.engines.append(prepared_engine)
        self._replaced_optimizers[id(user_optimizer)] = user_optimizer, engine_optimizer
        item.value = engine
        optimizer.value = engine_optimizer

    def _facts_of_run(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        bundle: PrepareArguments,
        ctx: ProcessContext,
    ) -> RunFacts:
        batch_sizes = []
        for item in bundle.of("loader"):
            if batch_size := getattr(item.value, "batch_size", None):
                batch_sizes.append(batch_size)
        choose_size = min if self._plugin.is_train_batch_min else max
        dummy_schedulers = []
        for item in bundle.of("scheduler"):
            if isinstance(item.value, DummyScheduler):
                dummy_schedulers.append(item.value)
        return RunFacts(
            mixed_precision=self._config.mixed_precision,
            accumulation=self._config.gradient_accumulation.num_steps,
            world_size=ctx.world.size,
            micro_batch=choose_size(batch_sizes) if batch_sizes else None,
            hidden_size=_read_hidden_size(model),
            optimizer=optimizer.options if isinstance(optimizer, Placeholder) else None,
            scheduler=dummy_schedulers[0].options if dummy_schedulers else None,
            on_cpu=ctx.device.type == "cpu",
        )

    def _add_hooks(self, hooked_engine: Engine) -> None:
        """Register hooks that cast inputs and outputs as autocast would, and record which engines a loss may come from."""
        half_dtype = _HALF_DTYPES.get(self._config.mixed_precision)
        keeps_outputs = self._config.autocast.output_dtype == "keep"

        # Any: the model's arguments
        def cast_inputs(_: nn.Module, args: Any, kwargs: Any) -> Any:
            hooked_engine.ran = hooked_engine.ran or torch.is_grad_enabled()
            hooked_engine.optimizer.refresh()
            if half_dtype is None:
                return None
            return _cast_floats((args, kwargs), half_dtype)

        def cast_outputs(_: nn.Module, args: Any, outputs: Any) -> Any:
            if half_dtype is None or keeps_outputs:
                return outputs
            return trees.to_fp32(outputs)

        hooked_engine.model.register_forward_pre_hook(cast_inputs, with_kwargs=True)
        hooked_engine.model.register_forward_hook(cast_outputs)
        evaluation_mode = EvaluationMode()
        hooked_engine.model.register_forward_pre_hook(
            evaluation_mode.enter, prepend=True
        )
        hooked_engine.model.register_forward_hook(
            evaluation_mode.leave, always_call=True
        )
        if hooked_engine.linear is not None:
            hooked_engine.model.register_forward_pre_hook(
                hooked_engine.linear.enter, prepend=True
            )
            hooked_engine.model.register_forward_hook(
                hooked_engine.linear.leave, always_call=True
            )

    # Any: schedulers share no base class
    def _rebind_scheduler(self, scheduler: Any) -> Any:
        """Return the scheduler, changed to update the groups of the engine's optimizer."""
        replacement = self._replaced_optimizers.get(
            id(getattr(scheduler, "optimizer", None))
        )
        if replacement is None:
            return scheduler
        prepared_optimizer = replacement[1]
        if not isinstance(scheduler, DummyScheduler):
            scheduler.optimizer = prepared_optimizer
        elif scheduler.lr_scheduler_callable is not None:
            scheduler = scheduler.lr_scheduler_callable(prepared_optimizer)
        else:
            scheduler = self._take_engine_scheduler(prepared_optimizer)
        prepared_optimizer.schedule = prepared_optimizer.schedule or scheduler
        return scheduler

    # Any: DeepSpeed is untyped
    def _take_engine_scheduler(self, prepared_optimizer: DeepSpeedOptimizer) -> Any:
        engine = prepared_optimizer.engine
        # the loop steps it, like any scheduler
        engine_scheduler = engine.lr_scheduler
        engine.lr_scheduler = None
        if engine_scheduler is None:
            raise PrepareError(
                "a DummyScheduler was prepared, but DeepSpeed's configuration has no scheduler section, so no scheduler can be created. "
                'Add {"scheduler": {"type": "WarmupLR", "params": {...}}}, or prepare a real scheduler.'
            )
        engine_scheduler.optimizer = prepared_optimizer
        prepared_optimizer.take_options()
        show_rates(engine_scheduler, prepared_optimizer)
        return engine_scheduler

    # -- one step -------------------------------------------------------------------------------------------------
    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        return nullcontext()  # the end of a window reaches the engine with its step

    # Any: torch's keywords
    def backward(self, loss: Tensor, parts: int = 1, **kwargs: Any) -> None:
        passes_before = [engine.optimizer.num_passes for engine in self.engines]
        loss = divide_loss(loss, parts)
        loss_scale = self._find_loss_scale()
        with ExitStack() as exit_stack:
            for engine in self.engines:
                exit_stack.enter_context(engine.optimizer.in_backward())
                if engine.linear is not None:
                    # for recomputed blocks
                    exit_stack.enter_context(engine.linear.in_place())
            (loss if loss_scale == 1.0 else loss * loss_scale).backward(**kwargs)  # type: ignore[no-untyped-call]
        for engine, num_passes in zip(self.engines, passes_before, strict=True):
            if engine.optimizer.num_passes != num_passes:
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

    def _find_loss_scale(self) -> float:
        """Return the loss scale of the engines that this loss may come from."""
        ran_engines = [engine for engine in self.engines if engine.ran]
        engines = ran_engines or self.engines
        loss_scales = {engine.optimizer.loss_scale for engine in engines}
        if len(loss_scales) > 1:
            raise StepError(
                f"backward() was called after the forward of several engines whose loss scales differ ({sorted(loss_scales)}), so some "
                "gradients would have the wrong scale. Use mixed_precision='bf16', or call "
                "backward() after each engine's forward."
            )
        return loss_scales.pop() if loss_scales else 1.0

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
        clipped_ids = set(map(id, parameters))
        clipped_engines = [
            engine for engine in self.engines if clipped_ids & _trained_ids(engine)
        ]
        trained_ids = set().union(*map(_trained_ids, clipped_engines))
        if len(clipped_engines) != 1 or not trained_ids <= clipped_ids:
            raise StepError(
                f"clip_grad_norm_() got {len(clipped_ids)} parameters, of {len(clipped_engines)} engines with {len(trained_ids)} parameters in all; an engine stores "
                "the gradients of all its parameters together, so they can only be clipped together. Call it once per model, with "
                "model.parameters()."
            )
        num_unowned = 0
        for parameter in parameters:
            num_unowned += parameter.requires_grad and id(parameter) not in trained_ids
        if num_unowned:
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
        if (model_engine := self._engine_of(model)) is not None:
            module: nn.Module = model_engine.model.module
            return module
        return model if keep_precision else self._convert.undo(model)

    # Any: tensors and extra state
    def full_state_dict(self, model: nn.Module) -> dict[str, Any]:
        model_engine = self._engine_of(model)
        if model_engine is None or model_engine.made.stage < 3:
            return dict(self.unwrap(model).state_dict())
        model_engine.optimizer.refresh()
        gather_parameters = deepspeed_engine.import_deepspeed().zero.GatheredParameters
        whole_copies: dict[int, Tensor] = {}  # tied weights stay tied
        for state_tensor in model_engine.model.module.state_dict(
            keep_vars=True
        ).values():
            if hasattr(state_tensor, "ds_id") and id(state_tensor) not in whole_copies:
                with gather_parameters([state_tensor]):
                    whole_copies[id(state_tensor)] = state_tensor.detach().to(
                        "cpu", copy=True
                    )
        sharded_state = model_engine.model.module.state_dict(keep_vars=True)
        full_state = {}
        for state_key, state_tensor in sharded_state.items():
            if id(state_tensor) in whole_copies:
                state_tensor = whole_copies[id(state_tensor)]
            elif isinstance(state_tensor, Tensor):
                state_tensor = state_tensor.detach()
            full_state[state_key] = state_tensor
        return full_state

    @contextmanager
    def whole_weights(self, model: nn.Module) -> Iterator[None]:
        model_engine = self._engine_of(model)
        if model_engine is None:
            yield
            return
        parameters = list(model_engine.model.module.parameters())
        gather_parameters = deepspeed_engine.import_deepspeed().zero.GatheredParameters
        with ExitStack() as exit_stack:
            if model_engine.made.stage == 3:
                exit_stack.enter_context(gather_parameters(parameters, modifier_rank=0))
                _show_slices(parameters, False)
                exit_stack.callback(_show_slices, parameters, True)
            yield
        refresh_masters = getattr(
            model_engine.model.optimizer, "refresh_fp32_params", None
        )
        if callable(refresh_masters):
            refresh_masters()
            return
        with torch.no_grad():
            for model_group, master_group in zip(
                getattr(model_engine.model.optimizer, "fp16_groups", ()),
                getattr(model_engine.model.optimizer, "fp32_groups", ()),
                strict=True,
            ):
                for parameter, master_weight in zip(
                    model_group, master_group, strict=True
                ):
                    master_weight.copy_(parameter)

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
    save = engine.save_checkpoint
    load = engine.load_checkpoint

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


def _trained_ids(trained_engine: Engine) -> set[int]:
    return set(map(id, list_parameters(trained_engine.optimizer.param_groups)))


def _match_optimizers(models: list[Item], optimizers: list[Item]) -> dict[int, Item]:
    """Return the optimizer of each model, by the id of the model's item.

    Raises: PrepareError unless each optimizer belongs to exactly one model.
    """
    optimizer_of_model: dict[int, Item] = {}
    for optimizer in optimizers:
        optimized_ids = set(map(id, list_parameters(optimizer.value.param_groups)))
        class_name = type(optimizer.value).__name__
        owner_items = [
            item
            for item in models
            if optimized_ids & set(map(id, item.value.parameters()))
        ]
        owned_ids: set[int] = set()
        for item in owner_items:
            owned_ids.update(map(id, item.value.parameters()))
        if (
            len(owner_items) != 1
            or not optimized_ids <= owned_ids
            or id(owner_items[0]) in optimizer_of_model
        ):
            has_other_optimizer = (
                bool(owner_items) and id(owner_items[0]) in optimizer_of_model
            )
            if has_other_optimizer:
                reason = ", one of which has another optimizer"
            else:
                reason = ""
            raise PrepareError(
                f"{class_name} has parameters of {len(owner_items)} of the {len(models)} models in this prepare()"
                f"{reason}; a DeepSpeed engine trains one model with one optimizer. "
                "Prepare each model together with an optimizer over its own parameters."
            )
        optimizer_of_model[id(owner_items[0])] = optimizer
    return optimizer_of_model


def _read_hidden_size(model: nn.Module) -> int | None:
    config = getattr(model, "config", None)
    for model_config in (config, getattr(config, "text_config", None)):
        if isinstance(size := getattr(model_config, "hidden_size", None), int):
            return size
        if sizes := getattr(model_config, "hidden_sizes", None):
            return int(max(sizes))
    return None


def _cast_floats(tree: Any, dtype: torch.dtype) -> Any:  # Any: the model's arguments
    return trees.map_tensors(
        lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, tree
    )


STRATEGY: Final = OfferedStrategy(create=DeepSpeedStrategy)
