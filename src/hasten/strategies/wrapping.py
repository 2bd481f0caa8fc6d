"""Which modules of a model are sharded on their own, and which are left whole."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from torch import nn

from hasten.config.sharding import FullyShardedDataParallelPlugin
from hasten.errors import ConfigError
from hasten.strategies.blocks import blocks_by_class, repeated_blocks

_DEFAULT_MIN_PARAMS = 100_000_000


def blocks_to_shard(model: nn.Module, config: FullyShardedDataParallelPlugin) -> list[nn.Module]:
    """The modules that get a shard group of their own, innermost first; the root's group takes what is left."""
    policy = config.auto_wrap_policy
    if callable(policy):
        return _deepest_first(model, _by_callable(model, policy))
    match policy:
        case "no_wrap":
            return []
        case "size_based_wrap":
            return _deepest_first(model, _by_size(model, config.min_num_params or _DEFAULT_MIN_PARAMS))
        case "transformer_based_wrap" | "auto":
            names = config.transformer_cls_names_to_wrap or tuple(getattr(model, "_no_split_modules", None) or ())
            if config.transformer_cls_names_to_wrap:
                chosen = blocks_by_class(model, names, "fsdp.transformer_cls_names_to_wrap")
            else:
                chosen = [(n, m) for n, m in model.named_modules() if type(m).__name__ in names]
                chosen = chosen or repeated_blocks(model)
            return _deepest_first(model, [block for _, block in chosen])
    raise ConfigError(f"fsdp.auto_wrap_policy={policy!r} is unknown; see docs/sharding.md for the policies.")


def _by_callable(model: nn.Module, policy: Callable[..., object]) -> list[nn.Module]:
    """Modules for which `policy(module)` is true."""
    return [module for module in model.modules() if module is not model and policy(module)]


def _by_size(model: nn.Module, least: int) -> list[nn.Module]:
    """The smallest modules that have at least `least` parameters beyond those already in a group of their own."""
    chosen: list[nn.Module] = []

    def visit(module: nn.Module) -> int:
        rest = sum(p.numel() for p in module.parameters(recurse=False)) + sum(map(visit, module.children()))
        if module is not model and rest >= least and not isinstance(module, (nn.ModuleList, nn.ModuleDict)):
            chosen.append(module)
            return 0
        return rest

    visit(model)
    return chosen


def _deepest_first(model: nn.Module, chosen: Iterable[nn.Module]) -> list[nn.Module]:
    wanted = {id(module) for module in chosen}
    order = [module for module in model.modules() if id(module) in wanted and module is not model]
    depth = {id(module): name.count(".") for name, module in model.named_modules()}
    return sorted(order, key=lambda module: -depth[id(module)])


def ignored_parameters(model: nn.Module, config: FullyShardedDataParallelPlugin) -> set[nn.Parameter]:
    """The parameters of ignored modules, which stay whole on every rank.

    Raises: ConfigError when one of them is trained, because nobody would synchronise it.
    """
    given = config.ignored_modules
    if given is None:
        return set()
    if isinstance(given, str):
        modules = [module for name, module in model.named_modules() if name and re.fullmatch(given, name)]
    else:
        modules = list(given)
    inside = {id(parameter) for module in modules for parameter in module.parameters()}
    found = [(name, p) for name, p in model.named_parameters() if id(p) in inside]
    trained = [name for name, p in found if p.requires_grad]
    if trained:
        raise ConfigError(
            f"fsdp.ignored_modules covers {trained[0]!r} and {len(trained) - 1} more trainable parameters; they would "
            "be neither sharded nor synchronised and drift apart between processes. Freeze them with "
            "requires_grad_(False), or leave their modules out of ignored_modules."
        )
    return {p for _, p in found}
