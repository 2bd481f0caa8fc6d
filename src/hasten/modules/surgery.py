"""Finding and replacing modules inside a model."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn


def parent_of(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The module that holds `name`, and the name it holds it under."""
    path, _, child = name.rpartition(".")
    return model.get_submodule(path), child


def swap(model: nn.Module, name: str, fresh: nn.Module) -> nn.Module:
    """Put `fresh` in the place of the module called `name`; the module that was there."""
    parent, child = parent_of(model, name)
    old = parent.get_submodule(child)
    parent.register_module(child, fresh)
    return old


def swap_where(
    model: nn.Module,
    wanted: Callable[[str, nn.Module], bool],
    make: Callable[[str, nn.Module], nn.Module],
) -> list[str]:
    """Replace every wanted module by `make(name, module)`; the names replaced.

    A module reachable under several names is made once and put in all its places. Parts of a replaced module are not
    looked at.
    """
    done: list[str] = []
    fresh: dict[int, nn.Module] = {}
    for name, module in list(model.named_modules(remove_duplicate=False)):
        if not name or any(name.startswith(f"{outer}.") for outer in done) or not wanted(name, module):
            continue
        if id(module) not in fresh:
            fresh[id(module)] = make(name, module)
        swap(model, name, fresh[id(module)])
        done.append(name)
    return done


def linear_names(model: nn.Module) -> list[str]:
    """The names of the model's linear layers, in order of registration."""
    return [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """The modules of one class that a ModuleList or Sequential repeats: the blocks worth treating alike."""
    found: dict[int, nn.Module] = {}
    for module in model.modules():
        if not isinstance(module, (nn.ModuleList, nn.Sequential)) or len(module) < 2:
            continue
        classes = {type(child) for child in module}
        if len(classes) == 1 and any(True for child in module for _ in child.children()):
            found.update((id(child), child) for child in module)
    return list(found.values())
