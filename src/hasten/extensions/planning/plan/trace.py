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
from hasten.strategies.tensor.plan import decide_split

log = logging.getLogger(__name__)

_TP_SIZES: Final = (2, 4, 8, 16)


def trace_step(
    training_loop: Callable[[], object],
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
    structure = ModelStructure()
    planner = ScriptPlanner(precisions, structure.inspect_models)
    traced_steps = planner.run(training_loop)
    failed_step = next(
        (step for step in traced_steps if step.error and not step.run.recompute), None
    )
    if failed_step is not None:
        raise ConfigError(
            f"the training step of {name} cannot be traced: {failed_step.error}. A step that depends on the values of a batch cannot be "
            "planned; give module:function with the model and inputs only."
        )
    for step in traced_steps:
        if step.error:
            log.warning(
                "recompute is excluded from the plan of %s, because its step cannot be traced (%s)",
                name,
                step.error,
            )
            break
    script_settings = tuple(sorted(planner.own.items()))
    completed_steps = [step for step in traced_steps if not step.error]
    return replace(
        structure.join_steps(name, completed_steps),
        script_settings=script_settings,
    )


@dataclass(slots=True)
class ModelStructure:
    """Facts about the models, collected before they are replaced by fake ones."""

    parameters: tuple[ParameterKind, ...] = ()
    roles: ModuleRoles = field(default_factory=ModuleRoles)
    num_blocks: int = 0
    largest_block: int = 0
    block_frozen: int = 0
    tp_sizes: tuple[int, ...] = ()
    tp_summed: int = 0

    def inspect_models(self, models: list[nn.Module]) -> ModuleRoles:
        """Record parameters, blocks and layers that can be split."""
        largest_model = max(
            models,
            key=lambda inspected_model: sum(
                parameter.numel() for parameter in inspected_model.parameters()
            ),
        )
        blocks = _outermost_blocks(
            blocks_to_recompute(largest_model, FullyShardedDataParallelPlugin())
        )
        layer_split = self._find_splits(largest_model)
        kind_counts: Counter[ParameterKind] = Counter()
        for inspected_model in models:
            if inspected_model is largest_model:
                kinds = _list_kinds(inspected_model, blocks, layer_split.styles)
            else:
                kinds = _list_kinds(inspected_model, [], {})
            kind_counts.update(kinds)
        self.parameters = tuple(
            replace(kind, count=count) for kind, count in kind_counts.items()
        )
        self.num_blocks = len(blocks)
        self._measure_largest(blocks)
        rowwise_layers = []
        for name, style in layer_split.styles.items():
            if style.startswith("rowwise"):
                rowwise_layers.append(largest_model.get_submodule(name))
        self.roles = ModuleRoles(
            blocks=frozenset(map(id, blocks)),
            block_classes=tuple(sorted({type(block).__name__ for block in blocks})),
            by_rows=frozenset(map(id, rowwise_layers)),
        )
        return self.roles

    def _measure_largest(self, blocks: Sequence[nn.Module]) -> None:
        """Record the elements of the block with the most of them."""
        largest_block = max(
            blocks,
            key=lambda block: sum(
                parameter.numel() for parameter in block.parameters()
            ),
            default=None,
        )
        parameters = [] if largest_block is None else list(largest_block.parameters())
        self.largest_block = sum(parameter.numel() for parameter in parameters)
        self.block_frozen = sum(
            parameter.numel() for parameter in parameters if not parameter.requires_grad
        )

    def _find_splits(self, model: nn.Module) -> LayerSplit:
        """Return the layers that can be split; record the possible numbers of ranks."""
        tp_sizes: list[int] = []
        layer_split = LayerSplit("none")
        for tp_size in _TP_SIZES:
            try:
                larger_split = decide_split(model, "auto", (), tp_size)
            # this number of ranks does not divide the layers
            except (ConfigError, PrepareError):
                break
            # some layers would no longer be split
            if tp_sizes and larger_split.styles != layer_split.styles:
                break
            layer_split = larger_split
            tp_sizes.append(tp_size)
        self.tp_sizes = tuple(tp_sizes)
        for layer_name, style in layer_split.styles.items():
            layer = matrix_of(model.get_submodule(layer_name))
            if layer is not None:
                if style.startswith("rowwise"):
                    self.tp_summed += layer.outputs
                else:
                    self.tp_summed += layer.inputs
        return layer_split

    def join_steps(self, name: str, traced_steps: Sequence[TracedStep]) -> ModelTrace:
        """Return one trace of all steps."""
        saved_bytes = (
            next(
                (
                    step.saved
                    for step in traced_steps
                    if step.saved is not None and step.saved.total
                ),
                None,
            )
            or Saved()
        )
        variants = []
        for one_sample_step in (step for step in traced_steps if step.run.samples == 1):
            two_sample_step = next(
                (
                    s
                    for s in traced_steps
                    if s.run.samples == 2 and _same_variant(s, one_sample_step)
                ),
                None,
            )
            if two_sample_step is not None:
                variants.append(_fit_variant(one_sample_step, two_sample_step))
        optimizer_facts = next(
            (step.optimizer for step in traced_steps if step.optimizer is not None),
            None,
        )
        return ModelTrace(
            name=name,
            parameters=self.parameters,
            optimizer=optimizer_facts or OptimizerFacts(),
            variants=tuple(variants),
            num_blocks=self.num_blocks,
            block_classes=self.roles.block_classes,
            largest_block=self.largest_block,
            block_frozen=self.block_frozen,
            split_share=saved_bytes.split / max(saved_bytes.total, 1),
            tp_sizes=self.tp_sizes,
            tp_summed=self.tp_summed,
            sequence=saved_bytes.sequence,
        )


def _same_variant(first_step: TracedStep, second_step: TracedStep) -> bool:
    return (
        first_step.run.precision == second_step.run.precision
        and first_step.run.recompute == second_step.run.recompute
    )


def _outermost_blocks(blocks: Sequence[nn.Module]) -> list[nn.Module]:
    nested_ids = set()
    for block in blocks:
        for submodule in block.modules():
            if submodule is not block:
                nested_ids.add(id(submodule))
    return [block for block in blocks if id(block) not in nested_ids]


def _list_kinds(
    model: nn.Module, blocks: Sequence[nn.Module], layer_styles: dict[str, TensorStyle]
) -> list[ParameterKind]:
    """Return every parameter once, as its kind."""
    kind_by_id: dict[int, ParameterKind] = {}
    for owner, parameter_path, parameter in owned_parameters(model, list(blocks)):
        if id(parameter) in kind_by_id:
            continue
        module_path, _, parameter_name = parameter_path.rpartition(".")
        split_dim = None
        if module_path in layer_styles:
            split_dim = split_dims(
                model.get_submodule(module_path), layer_styles[module_path]
            ).get(parameter_name)
        kind_by_id[id(parameter)] = ParameterKind(
            shape=tuple(parameter.shape),
            item=parameter.element_size(),
            trained=parameter.requires_grad,
            in_block=owner is not model,
            split=split_dim,
        )
    return list(kind_by_id.values())


def _fit_variant(one_sample_step: TracedStep, two_sample_step: TracedStep) -> Variant:
    """Return the linear fits through steps of one and of two samples."""
    one_sample = one_sample_step.watched
    two_samples = two_sample_step.watched
    dtype_names = sorted({*one_sample.flops, *two_samples.flops})
    flops = {}
    for dtype_name in dtype_names:
        flops[dtype_name] = LinearCost.from_measurements(
            one_sample.flops.get(dtype_name, 0.0),
            two_samples.flops.get(dtype_name, 0.0),
        )
    return Variant(
        precision=one_sample_step.run.precision,
        recompute=bool(one_sample_step.run.recompute),
        flops=flops,
        moved=LinearCost.from_measurements(one_sample.moved, two_samples.moved),
        operations=max(one_sample.operations, two_samples.operations),
        moments=tuple(_fit_moments(one_sample.alive, two_samples.alive)),
    )


def _fit_moments(
    one_sample: Sequence[tuple[int, int, int]],
    two_samples: Sequence[tuple[int, int, int]],
) -> list[Moment]:
    """Return the moments of both steps paired by position; for steps that differ in length, only the highest ones."""
    if len(one_sample) != len(two_samples):
        one_sample = [max(one_sample, key=sum, default=(0, 0, 0))]
        two_samples = [max(two_samples, key=sum, default=(0, 0, 0))]
    gradient_bytes = max((gradients for _, _, gradients in one_sample), default=0) or 1
    moments = []
    for first, second in zip(one_sample, two_samples, strict=True):
        moments.append(
            Moment(
                activations=LinearCost.from_measurements(first[0], second[0]),
                copies=LinearCost.from_measurements(first[1], second[1]),
                gradients=first[2] / gradient_bytes,
            )
        )
    return moments
