"""hasten's preparer, making the established classes and letting strangers through."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any, Final

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from accelerate._impl.composed import Composed
from accelerate._impl.environment.packages import (
    is_bitsandbytes_multi_backend_available,
    is_xpu_available,
)
from accelerate._impl.loaders.base import PreparedLoader
from accelerate._impl.models.other import show_original_forward
from accelerate._impl.optim.deepspeed import (
    DeepSpeedOptimizerWrapper,
    DeepSpeedSchedulerWrapper,
)
from accelerate._impl.optim.optimizer import AcceleratedOptimizer
from accelerate._impl.optim.scheduler import AcceleratedScheduler
from accelerate._impl.settings.general import DataLoaderConfiguration
from accelerate._impl.surface.messages import message
from hasten import prepare_args as bundle
from hasten.accelerator.components import components
from hasten.accelerator.preparing import Preparer
from hasten.errors import PrepareError
from hasten.extensions.deepspeed.placeholders import DummyOptim, DummyScheduler
from hasten.modules.names import plain_name
from hasten.optim.engine import EngineOptimizer
from hasten.optim.optimizer import PreparedOptimizer

# Any in this file: the user's objects.
_SCHEDULERS = (LRScheduler, AcceleratedScheduler, DummyScheduler)
PREPARED: Final = "_is_accelerate_prepared"  # the mark libraries look for


class EstablishedPreparer(Preparer):
    """Turns what the user gives into AcceleratedOptimizer, AcceleratedScheduler and DataLoaderShard."""

    def __init__(self, accelerator: Composed) -> None:
        its = components(accelerator)
        super().__init__(
            accelerator.config, accelerator.ctx, its.strategy, its.precision, its.clock
        )
        self.done = its.prepared
        # which owns the preparer
        self._accelerator: Composed = weakref.proxy(accelerator)
        self._engine_schedules = False

    def prepare(
        self,
        objects: tuple[Any, ...],
        placement: Sequence[bool | None] | None = None,
        train: bool = True,
    ) -> Any:
        """Return the objects prepared, in call order; what is none of the known kinds comes back as it is."""
        self._accelerator.follow_plugins()
        if placement is not None:
            placements = list(placement)
        else:
            placements = [None] * len(objects)
        if len(placements) != len(objects):
            raise ValueError(message("placement_of_each", len(objects)))
        self._engine_schedules = any(
            isinstance(value, DummyScheduler) for value in objects
        )
        known_indices = []
        for object_index, value in enumerate(objects):
            if not _is_unknown(value):
                known_indices.append(object_index)
        independent_indices = []
        for object_index in known_indices:
            if self._follows_no_model(objects[object_index], objects):
                independent_indices.append(object_index)
        known_indices = [
            object_index
            for object_index in known_indices
            if object_index not in independent_indices
        ]
        puts_on_device = []
        for placement_of_object in placements:
            puts_on_device.append(
                bool(
                    self._accelerator.device_placement
                    if placement_of_object is None
                    else placement_of_object
                )
            )
        result = list(objects)
        # before schedulers, which look for their optimizers
        for object_index in independent_indices:
            result[object_index] = self._prepare_optimizer(objects[object_index])
        prepared = super().prepare(
            tuple(objects[i] for i in known_indices),
            [puts_on_device[i] for i in known_indices],
            train,
        )
        for object_index, value in zip(known_indices, prepared, strict=True):
            result[object_index] = value
        for object_index in (*known_indices, *independent_indices):
            if isinstance(result[object_index], PreparedOptimizer):
                result[object_index].device_placement = puts_on_device[object_index]
            setattr(result[object_index], PREPARED, True)
            show_original_forward(result[object_index])
        return tuple(result)

    def prepare_sharded_by(
        self, shard: Callable[[Any], Any], objects: tuple[Any, ...]
    ) -> tuple[Any, ...]:
        """Prepare objects whose models a client's function shards; their optimizers continue with the new parameters."""
        models = {}
        for object_index, value in enumerate(objects):
            if isinstance(value, torch.nn.Module):
                models[object_index] = value
        optimizers = {}
        for object_index, value in enumerate(objects):
            if isinstance(value, Optimizer):
                optimizers[object_index] = value
        result = list(objects)
        for object_index, model in models.items():
            result[object_index] = self.with_renewed_optimizers(
                shard, model, list(optimizers.values())
            )
        for object_index, optimizer in optimizers.items():
            result[object_index] = self._prepare_optimizer(optimizer)
        other_indices = []
        for object_index in range(len(objects)):
            if object_index not in models and object_index not in optimizers:
                other_indices.append(object_index)
        prepared = self.prepare(
            tuple(objects[object_index] for object_index in other_indices)
        )
        for object_index, value in zip(other_indices, prepared, strict=True):
            result[object_index] = value
        return tuple(result)

    def with_renewed_optimizers(
        self,
        shard: Callable[[Any], Any],
        model: torch.nn.Module,
        optimizers: Sequence[Optimizer],
    ) -> Any:
        """Return the model that a client's function makes of `model`; optimizers continue with the new parameters."""
        whole_parameters = {}
        for parameter_name, parameter in model.named_parameters():
            whole_parameters[plain_name(parameter_name)] = parameter
        sharded = shard(model)
        setattr(sharded, PREPARED, True)
        if not any(sharded is prepared_model for prepared_model in self.done.models):
            self.done.models.append(sharded)
        parameters = {}
        for parameter_name, parameter in sharded.named_parameters():
            parameters[plain_name(parameter_name)] = parameter
        renewed = {
            id(old): parameters[parameter_name]
            for parameter_name, old in whole_parameters.items()
        }
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["params"] = [renewed.get(id(old), old) for old in group["params"]]
        return sharded

    def _follows_no_model(self, value: Any, objects: tuple[Any, ...]) -> bool:
        """Return whether this is an optimizer of a model that is prepared later, or never, and whose parameters stay in place."""
        if not isinstance(value, Optimizer) or self.done.holds(value):
            return False
        caps = self._strategy.caps
        if (
            caps.sharded_state
            or caps.hides_gradients
            or isinstance(value, EngineOptimizer | DummyOptim)
        ):
            return False
        models = []
        for candidate in (*objects, *self.done.models):
            if isinstance(candidate, torch.nn.Module):
                models.append(candidate)
        model_parameter_ids = set()
        for model in models:
            for parameter in model.parameters():
                model_parameter_ids.add(id(parameter))
        for group in value.param_groups:
            for candidate in group["params"]:
                if id(candidate) not in model_parameter_ids:
                    return True
        return False

    def _prepare_optimizer(self, optimizer: Optimizer) -> AcceleratedOptimizer:
        optimizer_class = AcceleratedOptimizer
        if isinstance(optimizer, EngineOptimizer):
            optimizer_class = DeepSpeedOptimizerWrapper
        prepared = optimizer_class(
            optimizer,
            scaler=self._precision.scaler,
            clock=self._clock,
            precision=self._precision,
        )
        self.done.optimizers.append(prepared)
        return prepared

    def _prepare_scheduler(self, scheduler: Any) -> AcceleratedScheduler:
        inner = getattr(scheduler, "optimizer", None)
        owners = []
        for prepared_optimizer in self.done.optimizers:
            if inner in (prepared_optimizer, prepared_optimizer.optimizer):
                owners.append(prepared_optimizer)
        scheduler_class = AcceleratedScheduler
        if self._engine_schedules:
            scheduler_class = DeepSpeedSchedulerWrapper
        loader_config = self._accelerator.dataloader_config
        follows = self._accelerator.step_scheduler_with_optimizer
        prepared = scheduler_class(
            scheduler,
            owners or self.done.optimizers,
            follows,
            loader_config.split_batches,
        )
        self.done.schedulers.append(prepared)
        return prepared

    def loader(
        self,
        loader: Any,
        puts_on_device: bool,
        already_sharded: bool | None = None,
        slice_fn: Any = None,
    ) -> Any:
        if isinstance(loader, PreparedLoader):
            if not any(
                loader is prepared_loader for prepared_loader in self.done.loaders
            ):
                self.done.loaders.append(loader)
            return loader
        loader_config = self._accelerator.dataloader_config
        readers = self._accelerator.readers()
        is_plain_data_parallel = readers.size == self._accelerator.ctx.world.size
        prepared = self._accelerator.share_loader(
            loader,
            self._accelerator.device,
            num_processes=self._accelerator.num_processes
            if is_plain_data_parallel
            else readers.size,
            process_index=self._accelerator.process_index
            if is_plain_data_parallel
            else readers.rank,
            put_on_device=puts_on_device,
            rng_types=list(self._accelerator.rng_types),
            slice_fn_for_dispatch=slice_fn,
            torch_device_mesh=self._accelerator.torch_device_mesh,
            **{
                config_field.name: getattr(loader_config, config_field.name)
                for config_field in fields(DataLoaderConfiguration)
            },
        )
        prepared.clock = self._clock
        setattr(prepared, PREPARED, True)
        self.done.loaders.append(prepared)
        return prepared


def check_quantized(model: Any, device: torch.device) -> None:
    """Raise a ValueError for a quantized model whose weights are offloaded, or on another device than this run's."""
    module_devices = list(getattr(model, "hf_device_map", {}).values())
    if not (
        getattr(model, "is_loaded_in_8bit", False)
        or getattr(model, "is_loaded_in_4bit", False)
    ):
        return
    trains_on_cpu = is_bitsandbytes_multi_backend_available()
    if "disk" in module_devices or (
        "cpu" in module_devices and (is_xpu_available() or not trains_on_cpu)
    ):
        raise ValueError(message("quantized_and_offloaded"))
    elsewhere = (
        len(module_devices) == 1
        and isinstance(module_devices[0], int)
        and module_devices[0] != (device.index or 0)
    )
    if elsewhere and not trains_on_cpu:
        raise ValueError(message("quantized_elsewhere"))


def step_of(value: Any) -> str | None:
    """Return the name of the Accelerator's method that prepares an object of this kind; None for unknown kinds."""
    if isinstance(value, type):
        return None
    if isinstance(value, torch.utils.data.DataLoader):
        return "prepare_data_loader"
    if isinstance(value, torch.nn.Module):
        return "prepare_model"
    if isinstance(value, Optimizer):
        return "prepare_optimizer"
    if isinstance(value, _SCHEDULERS):
        return "prepare_scheduler"
    return None


def _is_unknown(value: Any) -> bool:
    # quirk: STRANGERS_PASS
    try:
        if isinstance(value, type):
            object_kind = "nothing"
        else:
            object_kind = bundle.kind_of(value)
        return object_kind == "nothing" or (
            object_kind == "scheduler" and not isinstance(value, _SCHEDULERS)
        )
    except PrepareError:
        return True
