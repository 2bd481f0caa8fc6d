"""Finding a module that fits into what is left of a device, with those that share its parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from hasten.checkpoint.export import parse_size

# Any in this file: modules as callers list them.


def get_module_size_with_ties(
    tied_params: list[str], module_size: int, module_sizes: Mapping[str, int], modules_to_treat: Any
) -> tuple[int, list[str], list[nn.Module]]:
    """Bytes of a module with those that share its parameters, and which these are."""
    names, parts = [], []
    for tied in tied_params:
        found = next(
            ((name, part) for name, part in modules_to_treat if tied.startswith(f"{name}.") or tied == name), None
        )
        if found is not None and found[0] not in names:
            names.append(found[0])
            parts.append(found[1])
            module_size += module_sizes[found[0]] - module_sizes.get(tied, 0)
    return module_size, names, parts


def fallback_allocate(
    modules: list[tuple[str, nn.Module]],
    module_sizes: Mapping[str, int],
    size_limit: int | str,
    no_split_module_classes: list[str] | None = None,
    tied_parameters: list[list[str]] | None = None,
) -> tuple[str | None, nn.Module | None, list[tuple[str, nn.Module]]]:
    """The first module that fits into the limit, with its name, and the modules without it.

    A module that is too large is looked into, unless its class is not to be split.
    """
    limit = parse_size(size_limit)
    for at, (name, part) in enumerate(modules):
        if _size_with_ties(name, module_sizes, modules, tied_parameters or ()) <= limit:
            return name, part, [*modules[:at], *modules[at + 1 :]]
        inside = [] if type(part).__name__ in (no_split_module_classes or ()) else _children(name, part)
        found, chosen, rest = fallback_allocate(inside, module_sizes, limit, no_split_module_classes, tied_parameters)
        if found is not None:
            return found, chosen, [*modules[:at], *rest, *modules[at + 1 :]]
    return None, None, list(modules)


def _children(name: str, part: nn.Module) -> list[tuple[str, nn.Module]]:
    return [(f"{name}.{one}", child) for one, child in part.named_children()]


def _size_with_ties(name: str, sizes: Mapping[str, int], modules: Any, tied_parameters: Any) -> int:
    """Bytes of a module with those that share its parameters."""
    inside = [ties for ties in tied_parameters if any(one.startswith(f"{name}.") for one in ties)]
    others = [one for ties in inside for one in ties if not one.startswith(f"{name}.")]
    return get_module_size_with_ties(others, sizes[name], sizes, modules)[0]
