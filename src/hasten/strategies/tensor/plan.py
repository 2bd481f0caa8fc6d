"""Layers to split over tensor-parallel ranks, and their styles: by the user's plan, the model's, or that of torch's layers."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import translate
from inspect import signature
from typing import Any, Final, cast, get_args

from torch import nn

from hasten.config.sections.parallel import TensorStyle
from hasten.errors import ConfigError, PrepareError
from hasten.runtime.mesh_plan import divisors
from hasten.strategies.experts.plan import reason_against_sharding
from hasten.strategies.tensor import heads as tensor_heads
from hasten.strategies.tensor.layers import (
    LayerSplit,
    adapted_layer,
    linear_layers,
    matrix_of,
)

STYLES: Final = get_args(TensorStyle)
_PLAN_OF_TORCH: Final = (("linear1", "colwise"), ("linear2", "rowwise"))
"""Plan of torch's transformer layers, whose attention uses the weights of its layers without calling the layers."""
_ALIASES: Final = (
    ("colwise_rep", "colwise_gather_output"),
    ("rowwise_rep", "rowwise_split_input"),
    ("replicated_with_grad_allreduce", "replicate_sum_gradients"),
    ("moe_tp_experts", "experts"),
)
"""Names in the plans of transformers' models."""


def decide_split(
    model: nn.Module,
    plan: Mapping[str, str] | str,
    divide: Sequence[str],
    num_ranks: int,
    experts: bool = True,
) -> LayerSplit:
    """Return the layers to split, checked against their sizes; the model is not changed.

    `experts=False` leaves modules of stacked experts to expert parallelism.
    Raises: ConfigError for a plan that names layers that do not exist or cannot be split; PrepareError for a model without a
    plan.
    """
    if isinstance(plan, str):
        split = _split_by_carried_plans(model, experts)
    else:
        split = _split_by_plan(model, plan, "tp_plan")
    if not split.styles:
        raise PrepareError(
            f"{type(model).__name__} has no tensor-parallel plan that splits a layer over {num_ranks} ranks{_list_reasons(split.left)}, so every "
            f"rank would compute the same. {_NAME_LAYERS}"
        )
    for name, style in split.styles.items():
        _check_layer(model, name, style, num_ranks, split)
    tensor_heads.refuse_split_heads(model, split, num_ranks)
    split.summed = list(
        dict.fromkeys([*split.summed, *tensor_heads.norms_of_heads(model, split)])
    )
    tensor_heads.divide_named(model, split, divide, num_ranks)
    _split_adapters(model, split)
    return split


def _split_by_carried_plans(model: nn.Module, experts: bool) -> LayerSplit:
    """Return the layers of the plans that the model and its submodules carry."""
    split = LayerSplit("no plan")
    for prefix, carrier, plan in _modules_with_plan(model):
        split.source = f"the plan of {type(carrier).__name__}"
        submodule_split = _split_by_plan(model, plan, split.source, prefix)
        split.styles |= submodule_split.styles
        split.left |= submodule_split.left
        split.summed += submodule_split.summed
    if not experts:
        for name in [
            name for name, style in split.styles.items() if style == "experts"
        ]:
            split.drop_layer(name, "its experts are split over ep")
    return split


def _modules_with_plan(
    model: nn.Module,
) -> Iterator[tuple[str, nn.Module, Mapping[str, str]]]:
    """Yield the outermost modules with a `tp_plan`, and torch's layers; a wrapper may expose that of the model inside it."""
    prefixes: list[str] = []
    for module_name, module in model.named_modules():
        if any(
            not prefix or module_name.startswith(f"{prefix}.") for prefix in prefixes
        ):
            continue
        plan = _plan_of(module)
        if plan:
            prefixes.append(module_name)
            yield module_name, module, plan


def _plan_of(module: nn.Module) -> Mapping[str, str]:
    if isinstance(module, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer):
        return dict(_PLAN_OF_TORCH)
    has_plan = "tp_plan" in vars(module) or hasattr(type(module), "tp_plan")
    # Any: an attribute of other code
    plan: Any = getattr(module, "tp_plan", None) if has_plan else None
    return plan if isinstance(plan, Mapping) else {}


def _list_reasons(left: Mapping[str, str]) -> str:
    return "".join(f"; {name}: {why}" for name, why in list(left.items())[:3])


_NAME_LAYERS: Final = (
    "Name its layers with ParallelismConfig(tp_plan={pattern: style}): 'colwise' for layers that widen, 'rowwise' for those that follow "
    "them, 'colwise_gather_output' for a layer by itself (see docs/parallel.md). Or set tp_size=1."
)


def _split_by_plan(
    model: nn.Module,
    plan: Mapping[str, str],
    source: str,
    carrier: str | None = None,
) -> LayerSplit:
    """Return the modules that match the patterns; the first match decides.

    Names in the plan of a submodule, `carrier`, are relative to it.
    """
    split = LayerSplit(source)
    name_prefix = f"{carrier}." if carrier else ""
    decided_names: set[str] = set()
    names = _layer_names(model)
    for pattern, style_name in plan.items():
        style = dict(_ALIASES).get(style_name, style_name)
        matches = re.compile(translate(pattern)).match
        matching_names = []
        for name in names:
            if name.startswith(name_prefix) and matches(name[len(name_prefix) :]):
                matching_names.append(name)
        if carrier is None:
            _check_pattern(model, pattern, style_name, style, matching_names, source)
        for name in [name for name in matching_names if name not in decided_names]:
            decided_names.add(name)
            if style not in STYLES:
                raise ConfigError(
                    f"{source} uses {style_name!r} for {name!r}, which hasten does not support; gradients could be wrong without it. "
                    f"{_NAME_LAYERS}"
                )
            if style == "replicate_sum_gradients":
                split.summed.append(name)
            elif (
                style == "experts"
                and carrier is not None
                and reason_against_sharding(model.get_submodule(name)) is not None
            ):
                split.left[name] = str(
                    reason_against_sharding(model.get_submodule(name))
                )
            elif style != "replicate":
                split.styles[name] = cast(TensorStyle, style)
    return split


def _layer_names(model: nn.Module) -> list[str]:
    """Return the names that patterns are compared with: an adapter stands for all modules inside it."""
    names: list[str] = []
    adapter_prefixes: tuple[str, ...] = ()
    for name, module in model.named_modules(remove_duplicate=False):
        if not name or name.startswith(adapter_prefixes):
            continue
        names.append(name)
        if adapted_layer(module) is not module:
            adapter_prefixes += (f"{name}.",)
    return names


def _check_pattern(
    model: nn.Module,
    pattern: str,
    style_name: str,
    style: str,
    matching_names: list[str],
    source: str,
) -> None:
    if style not in STYLES:
        raise ConfigError(
            f"{source}: {pattern!r} has the style {style_name!r}, which is unknown; use one of {', '.join(STYLES)}."
        )
    if not matching_names:
        embedding_names = []
        for name, module in model.named_modules():
            if isinstance(module, nn.Embedding):
                embedding_names.append(name)
        layer_names = ", ".join(
            [*embedding_names, *(name for name, _ in linear_layers(model))]
        )
        raise ConfigError(
            f"{source}: {pattern!r} matches no module of {type(model).__name__}, so it would have no effect; layers that can be split "
            f"are {layer_names or 'none'}."
        )


def _check_layer(
    model: nn.Module,
    name: str,
    tensor_style: TensorStyle,
    num_ranks: int,
    layer_split: LayerSplit,
) -> None:
    layer = adapted_layer(model.get_submodule(name))
    if tensor_style == "experts":
        layer_split.numbers[name] = _check_experts(name, layer, num_ranks)
        return
    is_embedding = tensor_style in ("embedding_rowwise", "embedding_colwise")
    sizes = matrix_of(layer)
    if not isinstance(layer, nn.Embedding) if is_embedding else sizes is None:
        raise ConfigError(
            f"{name!r} is a {type(layer).__name__}, which cannot be split {tensor_style}: this style is for "
            f"{'torch.nn.Embedding' if is_embedding else 'torch.nn.Linear'}. Remove it from the plan."
        )
    if isinstance(layer, nn.Embedding):
        size_name, size = (
            ("rows", layer.num_embeddings)
            if tensor_style == "embedding_rowwise"
            else ("columns", layer.embedding_dim)
        )
        if (
            type(layer).forward is not nn.Embedding.forward
            and len(signature(type(layer).forward).parameters) != 2
        ):
            raise ConfigError(
                f"{name!r} is a {type(layer).__name__}, whose forward has other arguments than tokens, so it is unclear which rows it "
                "reads; do not split it."
            )
        if layer.max_norm is not None or layer.sparse:
            raise ConfigError(
                f"{name!r} uses max_norm or sparse gradients, which need the whole table; do not split it."
            )
    else:
        assert sizes is not None, "checked above"
        by_columns = tensor_style.startswith("colwise")
        size_name, size = (
            ("output features", sizes.outputs)
            if by_columns
            else ("input features", sizes.inputs)
        )
    if size % num_ranks:
        raise ConfigError(
            f"tp_size={num_ranks} does not divide the {size} {size_name} of {name!r}; ranks would hold layers of different "
            f"widths. Set tp_size to one of {divisors(size)}, or remove this layer from the plan."
        )


def _check_experts(name: str, module: nn.Module, num_ranks: int) -> int:
    """Return the number of experts in a module. Raises: ConfigError for a module whose experts cannot be split."""
    if (why := reason_against_sharding(module)) is not None:
        raise ConfigError(
            f"{name!r} ({type(module).__name__}) cannot be split by experts: {why}. Remove it from the plan."
        )
    number = int(next(module.parameters()).shape[0])
    if number % num_ranks:
        raise ConfigError(
            f"tp_size={num_ranks} does not divide the {number} experts of {name!r}; ranks would hold different numbers. Set "
            f"tp_size to one of {divisors(number)}, or remove this module from the plan."
        )
    return number


def _split_adapters(model: nn.Module, layer_split: LayerSplit) -> None:
    """Replace adapters in the split by the layers inside them.

    Beside a layer split by its outputs, B is split by its outputs and A stays whole; beside one split by its inputs, A is
    split by its inputs and B stays whole.
    Raises: ConfigError for an adapter other than plain LoRA.
    """
    for name, style in list(layer_split.styles.items()):
        adapter: Any = model.get_submodule(name)
        if adapted_layer(adapter) is adapter:
            continue
        del layer_split.styles[name]
        if hasattr(adapter, "modules_to_save"):
            layer_split.styles[f"{name}.original_module"] = style
            for adapter_name in adapter.modules_to_save:
                layer_split.styles[f"{name}.modules_to_save.{adapter_name}"] = style
            continue
        if not _is_plain_lora(adapter) or not style.startswith(("colwise", "rowwise")):
            raise ConfigError(
                f"{name!r} is a {type(adapter).__module__}.{type(adapter).__name__}, and tensor parallelism splits adapters of "
                "linear layers that are plain LoRA: ranks would compute another update. Leave this layer out of the adapter's "
                "target_modules, or shard the model with strategy='fsdp'."
            )
        layer_split.styles[f"{name}.base_layer"] = style
        is_split_by_outputs = style.startswith("colwise")
        split_matrix = "lora_B" if is_split_by_outputs else "lora_A"
        for adapter_name in adapter.lora_A:
            layer_split.styles[f"{name}.{split_matrix}.{adapter_name}"] = style
            is_dropping = isinstance(adapter.lora_dropout[adapter_name], nn.Dropout)
            if is_split_by_outputs and is_dropping:
                layer_split.common_dropouts.append(
                    f"{name}.lora_dropout.{adapter_name}"
                )


def _is_plain_lora(adapter: Any) -> bool:  # Any: a layer of PEFT
    """Return whether the adapter adds B(A(dropout(x))) to the output of its layer."""
    has_matrices = hasattr(adapter, "lora_A") and hasattr(adapter, "lora_B")
    uses_dora = any(getattr(adapter, "use_dora", {}).values())
    has_variant = bool(getattr(adapter, "lora_variant", None))
    return has_matrices and not uses_dora and not has_variant
