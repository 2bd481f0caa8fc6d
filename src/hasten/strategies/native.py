"""NativeStrategy: torch's parallelisms as transforms in a fixed order, with the transforms of a single process."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hasten.config.sections.loop import MasterWeights
from hasten.errors import PrepareError, StepError
from hasten.modules.forwarding import is_dispatched
from hasten.modules.hooks import hook_of
from hasten.optim import clip
from hasten.optim.engine import Placeholder
from hasten.optim.gradients import drop_gradients, zero_if_weightless
from hasten.optim.rebind import OptimizerRecord, has_dtensors
from hasten.optim.window import Number, backpropagate
from hasten.precision.base import Precision
from hasten.prepare_args import Item, PrepareArguments, is_factory
from hasten.runtime.context import ProcessContext
from hasten.strategies.base import (
    Caps,
    DistributionTransform,
    PrepareRequest,
    Stage,
    Transform,
    Weigh,
)
from hasten.trees import Tree

log = logging.getLogger(__name__)


class RunsStages(Protocol):
    """Distribution transform that runs its models itself, because no rank holds a whole model."""

    def forward_backward(
        self,
        model: nn.Module,
        batch: Tree,
        loss_of: Callable[[nn.Module, Tree], Tensor],
        weigh: Weigh,
        weight: Callable[[Tree], Number] | None = None,
    ) -> Tensor:
        """Run forward and backward of one batch, and return its loss."""
        ...

    def clip_norm(
        self, parameters: Sequence[Tensor], max_norm: float, norm_type: float
    ) -> Tensor:
        """Clip the gradients to a norm over all stages, and return the norm before clipping."""
        ...


class NativeStrategy:
    """Strategy made of transforms; the same class serves one process, DDP and sharded data parallelism."""

    def __init__(
        self,
        name: str,
        distribution: DistributionTransform,
        transforms: Sequence[Transform],
        caps: Caps,
        stages: RunsStages | None = None,
        on_optimizer: Callable[[Optimizer], None] | None = None,
    ) -> None:
        """Create the strategy; `on_optimizer` is called with each optimizer once its parameters are bound."""
        self.name = name
        self._stages = stages
        self._on_optimizer = on_optimizer
        self.caps = caps
        # Operations on a wrapped model are those of the transform that wraps it.
        self.no_sync = distribution.no_sync
        self.join = distribution.join
        self.full_state_dict = distribution.full_state_dict
        self.mark_forward_method = distribution.mark_forward_method
        self.drop_gradients = distribution.drop_gradients
        applied_transforms = list(transforms)
        # of a single process: it would change nothing
        if type(distribution) is not SingleProcess:
            applied_transforms.append(distribution)
        self._transforms = sorted(applied_transforms, key=attrgetter("stage"))

    def building(self, ctx: ProcessContext) -> AbstractContextManager[None]:
        return nullcontext()  # prepare() shards models

    def prepare(
        self,
        bundle: PrepareArguments,
        ctx: ProcessContext,
        precision: Precision,
        train: bool = True,
    ) -> None:
        model_items = bundle.of("model")
        optimizer_items = bundle.of("optimizer")
        new_models = list(map(attrgetter("value"), model_items))
        make_optimizers(optimizer_items, new_models)
        optimizer_records = []
        for item in optimizer_items:
            optimizer_records.append(
                OptimizerRecord.write(item.value, [*bundle.earlier, *new_models])
            )
        user_models = list(bundle.earlier)
        for item in model_items:
            request = PrepareRequest(place=item.place, train=train)
            for transform in self._transforms:
                item.value = transform.apply(item.value, request, ctx, precision)
            user_models.append(self.unwrap(item.value))
        for item, record in zip(optimizer_items, optimizer_records, strict=True):
            record.bind(item.value, user_models)
            if has_dtensors(item.value):
                # only sharded parameters need it
                from hasten.strategies import sharded_updates

                sharded_updates.refuse_unshardable(item.value)
                sharded_updates.update_own_shards(item.value)
            if self._on_optimizer is not None:
                self._on_optimizer(item.value)

    # Any: torch's keywords
    def backward(self, loss: Tensor, parts: int = 1, **kwargs: Any) -> None:
        if self._stages is not None:
            raise StepError(
                "accelerator.backward() cannot reach the layers that are on other pipeline ranks (pp_size > 1). Replace the "
                "forward and the backward of the loop by loss = accelerator.forward_backward(model, batch, loss_of), where "
                "loss_of takes the model and a batch and returns the loss."
            )
        backpropagate(loss, parts, **kwargs)

    def forward_backward(
        self,
        model: nn.Module,
        batch: Tree,
        loss_of: Callable[[nn.Module, Tree], Tensor],
        weigh: Weigh,
        weight: Callable[[Tree], Number] | None = None,
    ) -> Tensor:
        if self._stages is not None:
            return self._stages.forward_backward(model, batch, loss_of, weigh, weight)
        loss = loss_of(model, batch)
        amount = None if weight is None else weight(batch)
        with nullcontext() if amount is None else zero_if_weightless(loss, amount):
            self.backward(weigh(loss, amount))
        return loss.detach()

    def clip_norm(
        self, parameters: Sequence[Tensor], max_norm: float, norm_type: float
    ) -> Tensor:
        if self._stages is not None:
            return self._stages.clip_norm(parameters, max_norm, norm_type)
        return clip.clip_norm(parameters, max_norm, norm_type)

    def clip_value(self, parameters: Sequence[Tensor], limit: float) -> None:
        clip.clip_value(parameters, limit)

    def whole_weights(self, model: nn.Module) -> AbstractContextManager[None]:
        return nullcontext()  # sharded parameters are filled shard by shard

    def unwrap(
        self, model: nn.Module, keep_precision: bool = True, keep_compile: bool = True
    ) -> nn.Module:
        unchanged_stages = {Stage.RECOMPUTE, Stage.PLACE}
        if keep_precision:
            unchanged_stages.add(Stage.CONVERT)
        if keep_compile:
            unchanged_stages |= {Stage.COMPILE_BLOCKS, Stage.COMPILE_WHOLE}
        for transform in reversed(self._transforms):
            if transform.stage not in unchanged_stages:
                model = transform.undo(model)
        return model


def make_optimizers(
    items: Iterable[Item], models: list[nn.Module], placeholders: bool = False
) -> None:
    """Replace optimizer factories by optimizers over the parameters of the only trainable model."""
    for item in items:
        if isinstance(item.value, Placeholder) and not placeholders:
            raise PrepareError(
                f"{type(item.value).__name__} is a placeholder for an optimizer that DeepSpeed creates, so nothing would be trained "
                "with this strategy. Use strategy='deepspeed', or prepare a real optimizer."
            )
        if not is_factory(item.value):
            continue
        trainable_models = [
            model
            for model in models
            if any(parameter.requires_grad for parameter in model.parameters())
        ]
        if len(trainable_models) != 1:
            raise PrepareError(
                f"an optimizer factory was given with {len(trainable_models)} trainable models, so it is unclear which parameters it is for; "
                "prepare each model with its factory in a separate call, or create the optimizer."
            )
        optimizer: Optimizer = item.value(
            [
                parameter
                for parameter in trainable_models[0].parameters()
                if parameter.requires_grad
            ]
        )
        item.value = optimizer


@dataclass(slots=True)
class SingleProcess:
    """Distribution transform of a single process, which does not change models."""

    stage: ClassVar[Stage] = Stage.DISTRIBUTE

    def apply(
        self,
        model: nn.Module,
        request: PrepareRequest,
        ctx: ProcessContext,
        precision: Precision,
    ) -> nn.Module:
        return model

    def undo(self, model: nn.Module) -> nn.Module:
        return model

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        return nullcontext()

    # Any: tensors and extra state
    def full_state_dict(self, model: nn.Module) -> dict[str, Any]:
        return dict(model.state_dict())

    def mark_forward_method(self, model: nn.Module, name: str) -> None:
        return None

    def join(self, models: list[nn.Module]) -> AbstractContextManager[None]:
        return nullcontext()

    def drop_gradients(self, model: nn.Module) -> None:
        drop_gradients(model)


class PlaceOnDevice:
    """Transform that moves parameters and buffers to the device; optimizers keep pointing to the same parameters."""

    stage = Stage.PLACE

    def apply(
        self,
        model: nn.Module,
        request: PrepareRequest,
        ctx: ProcessContext,
        precision: Precision,
    ) -> nn.Module:
        expected_types = {ctx.device.type} if ctx.device.type == "cpu" else set[str]()
        device_types = set[str]()
        for tensor in chain(model.parameters(), model.buffers()):
            device_types.add(tensor.device.type)
        # hooks bring offloaded weights
        if "meta" in device_types and all(
            hook_of(module) is None for module in model.modules()
        ):
            refuse_meta(model)
        # the code that loaded the model has already spread it over devices
        if (
            device_types == expected_types
            or not request.place
            or hasattr(model, "hf_device_map")
            or is_dispatched(model)
        ):
            return model
        return model.to(ctx.device)

    def undo(self, model: nn.Module) -> nn.Module:
        return model


def refuse_meta(model: nn.Module) -> None:
    """Raise PrepareError if parameters of the model have no values."""
    on_meta = [
        parameter_name
        for parameter_name, parameter in model.named_parameters()
        if parameter.is_meta
    ]
    if on_meta:
        raise PrepareError(
            f"parameter {on_meta[0]!r} and {len(on_meta) - 1} more are on the meta device and have no values to "
            "train. Load them first with load_checkpoint_in_model(model, folder), or use strategy='fsdp', which initializes meta "
            "parameters."
        )


@dataclass(slots=True)
class Convert:
    """Transform that makes the model compute in the run's precision."""

    stage: ClassVar[Stage] = Stage.CONVERT
    masters: MasterWeights = "fp32"
    _precision: Precision | None = None

    def apply(
        self,
        model: nn.Module,
        request: PrepareRequest,
        ctx: ProcessContext,
        precision: Precision,
    ) -> nn.Module:
        if precision.spec == "no":
            return model
        self._precision = precision
        if request.train and self.masters == "fp32":
            give_masters(model)
        return precision.convert(model)

    def undo(self, model: nn.Module) -> nn.Module:
        return model if self._precision is None else self._precision.restore(model)


def give_masters(model: nn.Module) -> None:
    """Convert trained half-precision parameters to float32 in place; frozen ones keep their dtype.

    The model still computes in half precision. In bfloat16, updates below 1/256 of a weight are lost to rounding.
    """
    counts_by_dtype: dict[torch.dtype, int] = {}
    for parameter in model.parameters():
        dtype = parameter.dtype
        if parameter.requires_grad and dtype in (torch.float16, torch.bfloat16):
            grad = parameter.grad
            parameter.grad = None
            parameter.data = parameter.data.float()
            parameter.grad = None if grad is None else grad.float()
            counts_by_dtype[dtype] = counts_by_dtype.get(dtype, 0) + 1
    if counts_by_dtype:
        counts_text = " and ".join(
            f"{count} {str(dtype).removeprefix('torch.')}"
            for dtype, count in counts_by_dtype.items()
        )
        log.info(
            "%s: %s parameters are trained as float32 master weights (master_weights=keep keeps their dtype)",
            type(model).__name__,
            counts_text,
        )
