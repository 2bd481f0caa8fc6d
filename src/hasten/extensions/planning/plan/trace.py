"""Trace of a training loop: the structure of the model, and one step per variant, fitted linearly in the samples."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from torch import nn

from hasten.config.sections.parallel import FullyShardedDataParallelPlugin, TensorStyle
from hasten.errors import ConfigError, PrepareError
from hasten.extensions.planning.plan.takeover import ScriptPlanner, TracedStep
from hasten.extensions.planning.plan.traced import (
    LinearCost,
    ModelTrace,
    Moment,
    OptimizerFacts,
    ParameterKind,
    PrecisionName,
    Variant,
)
from hasten.extensions.planning.plan.watch import ModuleRoles, Saved
from hasten.strategies.fsdp.shard_groups import blocks_to_recompute, owned_parameters
from hasten.strategies.tensor.layers import LayerSplit, matrix_of, split_dims
from hasten.strategies.tensor.plan import decide

log = logging.getLogger(__name__)

_TP_SIZES: Final = (2, 4, 8, 16)


def trace(
    loop: Callable[[], object],
    name: str,
    precisions: Sequence[PrecisionName] = ("bf16",),
) -> ModelTrace:
    """Return the trace of one step of `loop`, which prepares a model with an Accelerator and trains it.

    Raises: ConfigError when the loop does not reach a step, or the step cannot run on fake tensors.
    """
    if not hasattr(os, "fork"):
        raise ConfigError(
            "planning needs fork(), which this system does not support; run it on Linux or macOS."
        )
    found = Findings()
    takeover = ScriptPlanner(precisions, found.look)
    steps = takeover.run(loop)
    failed = next(
        (step for step in steps if step.error and not step.run.recompute), None
    )
    if failed is not None:
        raise ConfigError(
            f"the training step of {name} cannot be traced: {failed.error}. A step that depends on the values of a batch cannot be "
            "planned; give module:function with the model and inputs only."
        )
    for step in steps:
        if step.error:
            log.warning(
                "recompute is excluded from the plan of %s, because its step cannot be traced (%s)",
                name,
                step.error,
            )
            break
    own = tuple(sorted(takeover.own.items()))
    return replace(
        found.joined(name, [step for step in steps if not step.error]), own=own
    )


@dataclass(slots=True)
class Findings:
    """Facts about the models, collected before they are replaced by fake ones."""

    parameters: tuple[ParameterKind, ...] = ()
    anatomy: ModuleRoles = field(default_factory=ModuleRoles)
    num_blocks: int = 0
    largest_block: int = 0
    block_frozen: int = 0
    tp_sizes: tuple[int, ...] = ()
    tp_summed: int = 0

    def look(self, models: list[nn.Module]) -> ModuleRoles:
        """Record parameters, blocks and layers that can be split."""
        model = max(models, key=lambda one: sum(p.numel() for p in one.parameters()))
        blocks = _outermost(
            blocks_to_recompute(model, FullyShardedDataParallelPlugin())
        )
        split = self._splits(model)
        kinds: Counter[ParameterKind] = Counter()
        for one in models:
            kinds.update(
                _kinds(
                    one,
                    blocks if one is model else [],
                    split.styles if one is model else {},
                )
            )
        self.parameters = tuple(
            replace(kind, count=count) for kind, count in kinds.items()
        )
        self.num_blocks = len(blocks)
        self._measure_largest(blocks)
        rows = [
            model.get_submodule(name)
            for name, style in split.styles.items()
            if style.startswith("rowwise")
        ]
        self.anatomy = ModuleRoles(
            blocks=frozenset(id(block) for block in blocks),
            block_classes=tuple(sorted({type(block).__name__ for block in blocks})),
            by_rows=frozenset(id(layer) for layer in rows),
        )
        return self.anatomy

    def _measure_largest(self, blocks: Sequence[nn.Module]) -> None:
        """Record the elements of the block with the most of them."""
        largest = max(
            blocks,
            key=lambda block: sum(p.numel() for p in block.parameters()),
            default=None,
        )
        parameters = [] if largest is None else list(largest.parameters())
        self.largest_block = sum(p.numel() for p in parameters)
        self.block_frozen = sum(p.numel() for p in parameters if not p.requires_grad)

    def _splits(self, model: nn.Module) -> LayerSplit:
        """Return the layers that can be split; record the possible numbers of ranks."""
        sizes: list[int] = []
        chosen = LayerSplit("none")
        for ranks in _TP_SIZES:
            try:
                found = decide(model, "auto", (), ranks)
            # this number of ranks does not divide the layers
            except (ConfigError, PrepareError):
                break
            # some layers would no longer be split
            if sizes and found.styles != chosen.styles:
                break
            chosen = found
            sizes.append(ranks)
        self.tp_sizes = tuple(sizes)
        for name, style in chosen.styles.items():
            layer = matrix_of(model.get_submodule(name))
            if layer is not None:
                self.tp_summed += (
                    layer.outputs if style.startswith("rowwise") else layer.inputs
                )
        return chosen

    def joined(self, name: str, steps: Sequence[TracedStep]) -> ModelTrace:
        """Return one trace of all steps."""
        saved = (
            next(
                (
                    step.saved
                    for step in steps
                    if step.saved is not None and step.saved.total
                ),
                None,
            )
            or Saved()
        )
        variants = []
        for one in (step for step in steps if step.run.samples == 1):
            two = next(
                (s for s in steps if s.run.samples == 2 and _alike(s, one)), None
            )
            if two is not None:
                variants.append(_variant(one, two))
        facts = next(
            (step.optimizer for step in steps if step.optimizer is not None), None
        )
        return ModelTrace(
            name=name,
            parameters=self.parameters,
            optimizer=facts or OptimizerFacts(),
            variants=tuple(variants),
            num_blocks=self.num_blocks,
            block_classes=self.anatomy.block_classes,
            largest_block=self.largest_block,
            block_frozen=self.block_frozen,
            split_share=saved.split / saved.total if saved.total else 0.0,
            tp_sizes=self.tp_sizes,
            tp_summed=self.tp_summed,
            sequence=saved.sequence,
        )


def _alike(one: TracedStep, other: TracedStep) -> bool:
    return (
        one.run.precision == other.run.precision
        and one.run.recompute == other.run.recompute
    )


def _outermost(blocks: Sequence[nn.Module]) -> list[nn.Module]:
    inside = {
        id(part) for block in blocks for part in block.modules() if part is not block
    }
    return [block for block in blocks if id(block) not in inside]


def _kinds(
    model: nn.Module, blocks: Sequence[nn.Module], ways: dict[str, TensorStyle]
) -> list[ParameterKind]:
    """Return every parameter once, as its kind."""
    found: dict[int, ParameterKind] = {}
    for owner, name, parameter in owned_parameters(model, list(blocks)):
        if id(parameter) in found:
            continue
        parent, _, leaf = name.rpartition(".")
        split = (
            split_dims(model.get_submodule(parent), ways[parent]).get(leaf)
            if parent in ways
            else None
        )
        found[id(parameter)] = ParameterKind(
            shape=tuple(parameter.shape),
            item=parameter.element_size(),
            trained=parameter.requires_grad,
            in_block=owner is not model,
            split=split,
        )
    return list(found.values())


def _variant(one: TracedStep, two: TracedStep) -> Variant:
    """Return the linear fits through steps of one and of two samples."""
    first, second = one.watched, two.watched
    names = sorted({*first.flops, *second.flops})
    return Variant(
        precision=one.run.precision,
        recompute=bool(one.run.recompute),
        flops={
            name: LinearCost.through(
                first.flops.get(name, 0.0), second.flops.get(name, 0.0)
            )
            for name in names
        },
        moved=LinearCost.through(first.moved, second.moved),
        operations=max(first.operations, second.operations),
        moments=tuple(_moments(first.alive, second.alive)),
    )


def _moments(
    one: Sequence[tuple[int, int, int]], two: Sequence[tuple[int, int, int]]
) -> list[Moment]:
    """Return the moments of both steps paired by position; for steps that differ in length, only the highest ones."""
    if len(one) != len(two):
        one, two = (
            [max(one, key=sum, default=(0, 0, 0))],
            [max(two, key=sum, default=(0, 0, 0))],
        )
    total = max((gradients for _, _, gradients in one), default=0) or 1
    return [
        Moment(
            activations=LinearCost.through(first[0], second[0]),
            copies=LinearCost.through(first[1], second[1]),
            gradients=first[2] / total,
        )
        for first, second in zip(one, two, strict=True)
    ]
