"""Choice of the modules that form shard groups, and of the parameters that stay whole."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

from torch import nn

from hasten.config.sections.parallel import FullyShardedDataParallelPlugin
from hasten.errors import ConfigError
from hasten.strategies.blocks import blocks_by_class, repeated_blocks

_DEFAULT_MIN_PARAMS: Final = 100_000_000
CONTAINERS: Final = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
"""Modules that are never called, so that the parameters of a group would not be gathered."""


def blocks_to_shard(
    model: nn.Module, fsdp_config: FullyShardedDataParallelPlugin
) -> list[nn.Module]:
    """Return the modules that form separate shard groups, innermost first; the root's group takes the rest."""
    policy = fsdp_config.auto_wrap_policy
    if callable(policy):
        if "recurse" in inspect.signature(policy).parameters:
            raise ConfigError(
                f"fsdp.auto_wrap_policy={policy!r} is a policy of FSDP1, which asks about whole subtrees. Give a function of a module that "
                "returns whether it is sharded on its own, or class names in fsdp.transformer_cls_names_to_wrap."
            )
        return _deepest_first(model, _by_callable(model, policy))
    match str(policy).lower():
        case "no_wrap":
            return []
        case "size_based_wrap":
            return _deepest_first(
                model,
                _by_size(model, fsdp_config.min_num_params or _DEFAULT_MIN_PARAMS),
            )
        case "transformer_based_wrap" | "auto":
            if names := fsdp_config.transformer_cls_names_to_wrap:
                blocks = blocks_by_class(
                    model, names, "fsdp.transformer_cls_names_to_wrap"
                )
            else:
                # set in transformers' models
                class_names = tuple(getattr(model, "_no_split_modules", None) or ())
                blocks = []
                for module in model.modules():
                    if type(module).__name__ in class_names:
                        blocks.append(module)
                blocks = blocks or [block for _, block in repeated_blocks(model)]
            return _deepest_first(model, blocks)
    raise ConfigError(
        f"fsdp.auto_wrap_policy={policy!r} is unknown; see docs/sharding.md for the policies."
    )


def blocks_to_recompute(
    model: nn.Module, fsdp_config: FullyShardedDataParallelPlugin
) -> list[nn.Module]:
    """Return the modules that form separate shard groups, or else the repeated blocks."""
    return blocks_to_shard(model, fsdp_config) or [
        block for _, block in repeated_blocks(model)
    ]


def _by_callable(model: nn.Module, policy: Callable[..., object]) -> list[nn.Module]:
    """Return the modules for which `policy(module)` is true."""
    chosen_modules = []
    for name, module in model.named_modules():
        if module is not model and policy(module):
            chosen_modules.append((name, module))
    for name, module in chosen_modules:
        if isinstance(module, CONTAINERS):
            raise ConfigError(
                f"fsdp.auto_wrap_policy chose {name!r}, a {type(module).__name__}, which has no forward, so its parameters would never "
                "be gathered. Let the policy choose the modules inside it."
            )
    return [module for _, module in chosen_modules]


def _by_size(model: nn.Module, min_params: int) -> list[nn.Module]:
    """Return the smallest modules with at least `least` parameters besides those already in a separate group."""
    chosen_modules: list[nn.Module] = []

    def visit_module(module: nn.Module) -> int:
        num_rest = sum(
            parameter.numel() for parameter in module.parameters(recurse=False)
        ) + sum(map(visit_module, module.children()))
        if (
            module is not model
            and num_rest >= min_params
            and not isinstance(module, CONTAINERS)
        ):
            chosen_modules.append(module)
            return 0
        return num_rest

    visit_module(model)
    return chosen_modules


def _deepest_first(model: nn.Module, modules: Iterable[nn.Module]) -> list[nn.Module]:
    module_ids = set(map(id, modules))
    order = []
    for module in model.modules():
        if id(module) in module_ids and module is not model:
            order.append(module)
    depth = {}
    for module_name, module in model.named_modules():
        depth[id(module)] = module_name.count(".")
    return sorted(order, key=lambda module: -depth[id(module)])


def owned_parameters(
    model: nn.Module, blocks: Sequence[nn.Module]
) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    """Yield each parameter under each of its names, with the block of its shard group (the model for the rest)."""
    block_ids = set(map(id, blocks))

    def visit_module(
        module: nn.Module, prefix: str, owner: nn.Module
    ) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
        owner = module if id(module) in block_ids else owner
        for name, parameter in module.named_parameters(
            recurse=False, remove_duplicate=False
        ):
            yield owner, prefix + name, parameter
        for name, child in module.named_children():
            yield from visit_module(child, f"{prefix}{name}.", owner)

    return visit_module(model, "", model)


def keep_ties_together(
    model: nn.Module, blocks: Sequence[nn.Module], ignored: set[nn.Parameter]
) -> tuple[list[nn.Module], list[str]]:
    """Return the blocks that share no parameter with another group, and one name of each shared parameter.

    A parameter can be in one shard group only. Blocks left out join the surrounding group, in which tied weights are equal.
    """
    kept_blocks = list(blocks)
    tied_names = dict[int, str]()
    while True:
        owners: dict[int, dict[int, nn.Module]] = {}
        for owner, name, parameter in owned_parameters(model, kept_blocks):
            if parameter not in ignored:
                owners.setdefault(id(parameter), {})[id(owner)] = owner
                if len(owners[id(parameter)]) > 1:
                    tied_names.setdefault(id(parameter), name)
        torn_groups = set()
        for groups in owners.values():
            if len(groups) > 1:
                for key in groups:
                    torn_groups.add(key)
        if not torn_groups:
            return kept_blocks, list(tied_names.values())
        kept_blocks = [block for block in kept_blocks if id(block) not in torn_groups]


def ignored_parameters(
    model: nn.Module, fsdp_config: FullyShardedDataParallelPlugin
) -> set[nn.Parameter]:
    """Return the parameters of ignored modules, which stay whole on every rank.

    Raises: ConfigError if one of them is trained, because its gradients would not be synchronised.
    """
    ignored = fsdp_config.ignored_modules
    if ignored is None:
        return set()
    if isinstance(ignored, str):
        modules = []
        for name, module in model.named_modules():
            if name and re.fullmatch(ignored, name):
                modules.append(module)
    else:
        modules = list(ignored)
    inside_ids = set()
    for module in modules:
        for parameter in module.parameters():
            inside_ids.add(id(parameter))
    inside_parameters = []
    for name, p in model.named_parameters():
        if id(p) in inside_ids:
            inside_parameters.append((name, p))
    trained_names = [name for name, p in inside_parameters if p.requires_grad]
    if trained_names:
        raise ConfigError(
            f"fsdp.ignored_modules covers {trained_names[0]!r} and {len(trained_names) - 1} more trainable parameters; they would be neither "
            "sharded nor synchronized and would diverge between processes. Freeze them with "
            "requires_grad_(False), or remove their modules from ignored_modules."
        )
    return {p for _, p in inside_parameters}
