"""NativeStrategy: torch's parallelisms as transforms in a fixed order, and optimizers bound to the transformed models."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, ClassVar, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from hasten.errors import PrepareError, StepError
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
        self.no_sync, self.join = distribution.no_sync, distribution.join
        self.full_state_dict, self.mark_forward_method = (
            distribution.full_state_dict,
            distribution.mark_forward_method,
        )
        self.drop_gradients = distribution.drop_gradients
        self._transforms = sorted([*transforms, distribution], key=attrgetter("stage"))

    def building(self, ctx: ProcessContext) -> AbstractContextManager[None]:
        return nullcontext()  # prepare() shards models

    def prepare(
        self,
        bundle: PrepareArguments,
        ctx: ProcessContext,
        precision: Precision,
        train: bool = True,
    ) -> None:
        model_items, optimizer_items = bundle.of("model"), bundle.of("optimizer")
        new_models = [item.value for item in model_items]
        make_optimizers(optimizer_items, new_models)
        optimizer_records = [
            OptimizerRecord.write(item.value, [*bundle.earlier, *new_models])
            for item in optimizer_items
        ]
        for item in model_items:
            request = PrepareRequest(place=item.place, train=train)
            for transform in self._transforms:
                item.value = transform.apply(item.value, request, ctx, precision)
        user_models = [
            *bundle.earlier,
            *(self.unwrap(item.value) for item in model_items),
        ]
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
class Alone:
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
