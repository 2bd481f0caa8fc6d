"""Layers to split over tensor-parallel ranks, and their styles: by the user's plan, the model's, or that of torch's layers."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
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
    BLOCKS,
    LayerSplit,
    base_of,
    linear_layers,
    matrix_of,
)

# Any in this file: attributes of PEFT's modules; PEFT need not be installed.


def layer_inside(module: nn.Module) -> nn.Module:
    """Return the layer inside an adapter, or inside a module that PEFT trains a copy of."""
    return base_of(getattr(module, "original_module", module))


def callable_base(model: nn.Module, name: str) -> str | None:
    """Return the name of the base layer that an adapter calls; None if the adapter computes with its weight instead."""
    module = model.get_submodule(name)
    if _uses_weight(module):
        return None
    while isinstance(getattr(module, "base_layer", None), nn.Module):
        name, module = f"{name}.base_layer", module.get_submodule("base_layer")
    return name


def expand(model: nn.Module, split: LayerSplit, advice: Callable[[], str]) -> None:
    """Assign styles to the layers inside wrapped layers: the style of a wrapped layer applies to its base layer.

    An adapter adds `B(A(x))`. For a style that splits outputs, B is split and A is whole; for one that splits inputs, A is
    split and B is whole. Raises: ConfigError for other adapters, with a plan that works for the model.
    """
    for name, style in list(split.styles.items()):
        module = model.get_submodule(name)
        trained_copies: Any = getattr(module, "modules_to_save", None)
        if isinstance(
            getattr(module, "original_module", None), nn.Module
        ) and isinstance(trained_copies, nn.ModuleDict):
            del split.styles[name]
            layer_names = [
                f"{name}.original_module",
                *(f"{name}.modules_to_save.{key}" for key in trained_copies),
            ]
            split.styles.update(dict.fromkeys(layer_names, style))
        elif isinstance(getattr(module, "base_layer", None), nn.Module):
            _expand_adapter(name, module, split, advice)


def _expand_adapter(
    name: str, module: nn.Module, split: LayerSplit, advice: Callable[[], str]
) -> None:
    style = split.styles.pop(name)
    adapters: Any = getattr(module, "lora_A", None)
    is_plain_lora = isinstance(adapters, nn.ModuleDict) and not _uses_weight(module)
    if not is_plain_lora or isinstance(
        getattr(module.get_submodule("base_layer"), "base_layer", None), nn.Module
    ):
        raise ConfigError(
            f"{name!r} is a {type(module).__module__.partition('.')[0]} {type(module).__name__}, an adapter other than plain LoRA, "
            f"which cannot be split {style} together with its base layer. {advice()}"
        )
    layer_names = [f"{name}.base_layer"]
    by_outputs = not style.startswith("rowwise")
    if not style.startswith("embedding"):
        layer_names += [
            f"{name}.{'lora_B' if by_outputs else 'lora_A'}.{key}" for key in adapters
        ]
        split.dropouts.update(
            {f"{name}.lora_dropout.{key}": not by_outputs for key in adapters}
        )
    elif style == "embedding_colwise" and len(getattr(module, "lora_embedding_A", ())):
        raise ConfigError(
            f"{name!r} is an embedding with an adapter, which cannot be split by columns. Use 'embedding_rowwise'."
        )
    for layer_name in layer_names:
        split.styles[layer_name] = style


def _uses_weight(module: nn.Module) -> bool:
    """Return True for an adapter that computes with its base layer's weight, such as DoRA, or differs from plain LoRA."""
    return bool(getattr(module, "lora_variant", None)) or bool(
        len(getattr(module, "lora_magnitude_vector", ()))
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


def decide(
    model: nn.Module,
    plan: Mapping[str, str] | str,
    divide: Sequence[str],
    ranks: int,
    experts: bool = True,
) -> LayerSplit:
    """Return the layers to split, checked against their sizes; the model is not changed.

    `experts=False` leaves modules of stacked experts to expert parallelism.
    Raises: ConfigError for a plan that names layers that do not exist or cannot be split; PrepareError for a model without a
    plan.
    """
    split = (
        _split_by_carried_plans(model, ranks, experts)
        if isinstance(plan, str)
        else _split_by_plan(model, plan, "tp_plan", ranks)
    )
    if not split.styles:
        raise PrepareError(
            f"{type(model).__name__} has no tensor-parallel plan that splits a layer over {ranks} ranks{_list_reasons(split.left)}, so every "
            f"rank would compute the same. {_suggest_plan(model, ranks)}"
        )
    for name, style in split.styles.items():
        _check_layer(model, name, style, ranks, split)
    tensor_heads.refuse_split_heads(model, split, ranks)
    split.summed = list(
        dict.fromkeys([*split.summed, *tensor_heads.norms_of_heads(model, split)])
    )
    tensor_heads.divide_named(model, split, divide, ranks)
    expand(model, split, lambda: _suggest_plan(model, ranks))
    return split


def _split_by_carried_plans(model: nn.Module, ranks: int, experts: bool) -> LayerSplit:
    """Return the layers of the plans that the model and its submodules carry."""
    split = LayerSplit("no plan")
    for prefix, carrier, plan in _modules_with_plan(model):
        split.source = f"the plan of {type(carrier).__name__}"
        submodule_split = _split_by_plan(model, plan, split.source, ranks, prefix)
        split.styles |= submodule_split.styles
        split.left |= submodule_split.left
        split.summed += submodule_split.summed
    if not experts:
        for name in [
            name for name, style in split.styles.items() if style == "experts"
        ]:
            split.drop(name, "its experts are split over ep")
    return split


def _modules_with_plan(
    model: nn.Module,
) -> Iterator[tuple[str, nn.Module, Mapping[str, str]]]:
    """Yield the outermost modules with a `tp_plan`, and torch's layers; a wrapper may expose that of the model inside it."""
    prefixes: list[str] = []
    for name, module in model.named_modules():
        if any(not prefix or name.startswith(f"{prefix}.") for prefix in prefixes):
            continue
        plan = _plan_of(module)
        if plan:
            prefixes.append(name)
            yield name, module, plan


def _plan_of(module: nn.Module) -> Mapping[str, str]:
    if isinstance(module, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer):
        return dict(_PLAN_OF_TORCH)
    has_plan = "tp_plan" in vars(module) or hasattr(type(module), "tp_plan")
    # Any: an attribute of other code
    plan: Any = getattr(module, "tp_plan", None) if has_plan else None
    return plan if isinstance(plan, Mapping) else {}


def _list_reasons(left: Mapping[str, str]) -> str:
    return "".join(f"; {name}: {why}" for name, why in list(left.items())[:3])


def _suggest_plan(model: nn.Module, ranks: int) -> str:
    """Return advice with a plan that works for this model: its linear layers, each with a gathered output."""
    plan = working_plan(model, ranks)
    if not plan:
        return f"None of its linear layers has a number of outputs that is divisible by {ranks}: set tp_size=1."
    return (
        f"Name the layers with ParallelismConfig(tp_plan={plan!r}), which splits layers separately; 'colwise' for layers that widen "
        "and 'rowwise' for those that follow them saves the exchange in between (see docs/parallel.md). Or set tp_size=1."
    )


def working_plan(model: nn.Module, ranks: int) -> dict[str, str]:
    """Return a plan that splits each linear layer separately and gathers its output; numbers in names become `*`."""
    names: dict[str, list[bool]] = {}
    num_uses: dict[int, int] = {}
    for _, parameter in model.named_parameters(remove_duplicate=False):
        num_uses[id(parameter)] = num_uses.get(id(parameter), 0) + 1
    for name, layer in linear_layers(model, ""):
        base_name = callable_base(model, name)
        if base_name is None:
            continue
        is_untied = (
            num_uses[id(model.get_submodule(base_name).get_parameter("weight"))] == 1
        )
        pattern = re.sub(r"(?:^|(?<=\.))\d+(?=\.|$)", "*", base_name)
        names.setdefault(pattern, []).append(layer.outputs % ranks == 0 and is_untied)
    return {
        pattern: "colwise_gather_output" for pattern, fits in names.items() if all(fits)
    }


def _split_by_plan(
    model: nn.Module,
    plan: Mapping[str, str],
    source: str,
    ranks: int,
    carrier: str | None = None,
) -> LayerSplit:
    """Return the modules that match the patterns; the first match decides.

    Names in the plan of a submodule, `carrier`, are relative to it.
    """
    split = LayerSplit(source)
    name_prefix = f"{carrier}." if carrier else ""
    decided_names: set[str] = set()
    names = [name for name, _ in model.named_modules(remove_duplicate=False) if name]
    for pattern, style_name in plan.items():
        style = dict(_ALIASES).get(style_name, style_name)
        matches = re.compile(translate(pattern)).match
        matching_names = [
            name
            for name in names
            if name.startswith(name_prefix) and matches(name[len(name_prefix) :])
        ]
        if carrier is None:
            _check_pattern(model, pattern, style_name, style, matching_names, source)
        for name in [name for name in matching_names if name not in decided_names]:
            decided_names.add(name)
            if style not in STYLES:
                raise ConfigError(
                    f"{source} uses {style_name!r} for {name!r}, which hasten does not support; gradients could be wrong without it. "
                    f"{_suggest_plan(model, ranks)}"
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
        embeddings = [
            name
            for name, part in model.named_modules()
            if isinstance(part, nn.Embedding)
        ]
        layer_names = ", ".join(
            [*embeddings, *(name for name, _ in linear_layers(model, ""))]
        )
        raise ConfigError(
            f"{source}: {pattern!r} matches no module of {type(model).__name__}, so it would have no effect; layers that can be split "
            f"are {layer_names or 'none'}."
        )


def _check_layer(
    model: nn.Module, name: str, style: TensorStyle, ranks: int, split: LayerSplit
) -> None:
    layer = layer_inside(model.get_submodule(name))
    if style == "experts":
        split.numbers[name] = _check_experts(name, layer, ranks)
        return
    is_embedding = style in ("embedding_rowwise", "embedding_colwise")
    sizes = matrix_of(layer)
    if not isinstance(layer, nn.Embedding) if is_embedding else sizes is None:
        raise ConfigError(
            f"{name!r} is a {type(layer).__name__}, which cannot be split {style}: this style is for "
            f"{'torch.nn.Embedding' if is_embedding else 'torch.nn.Linear'}. Remove it from the plan."
        )
    num_blocks = dict(BLOCKS).get(style, 1)
    if isinstance(layer, nn.Embedding):
        size_name, size = (
            ("rows", layer.num_embeddings)
            if style == "embedding_rowwise"
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
        by_columns = style.startswith("colwise")
        size_name, size = (
            ("output features", sizes.outputs)
            if by_columns
            else ("input features", sizes.inputs)
        )
    if size % (ranks * num_blocks):
        joined_text = (
            ""
            if num_blocks == 1
            else f", which are {num_blocks} projections side by side"
        )
        raise ConfigError(
            f"tp_size={ranks} does not divide the {size} {size_name} of {name!r}{joined_text}; ranks would hold layers of different "
            f"widths. Set tp_size to one of {divisors(size // num_blocks)}, or remove this layer from the plan."
        )


def _check_experts(name: str, module: nn.Module, ranks: int) -> int:
    """Return the number of experts in a module. Raises: ConfigError for a module whose experts cannot be split."""
    if (why := reason_against_sharding(module)) is not None:
        raise ConfigError(
            f"{name!r} ({type(module).__name__}) cannot be split by experts: {why}. Remove it from the plan."
        )
    number = int(next(module.parameters()).shape[0])
    if number % ranks:
        raise ConfigError(
            f"tp_size={ranks} does not divide the {number} experts of {name!r}; ranks would hold different numbers. Set "
            f"tp_size to one of {divisors(number)}, or remove this module from the plan."
        )
    return number
