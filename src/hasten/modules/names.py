"""Names of parameters that stay the same however a model is wrapped, and which names are tied together."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

_WRAPPER_PARTS: Final = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
"""Attributes under which torch's wrappers keep the module they wrap; no model of a user has such names."""
_WRAPPER_CLASSES: Final = (DistributedDataParallel, DataParallel)
"""Wrappers that keep the module under `module`, a name that a user's model may have as well."""


def plain_name(name: str) -> str:
    """`name` without the parts that compiling, recomputing and sharding wrappers put into it, wherever they are."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPER_PARTS)


def canonical_name(name: str, model: nn.Module | None = None) -> str:
    """`name` without the parts that wrappers (DDP, compile, checkpointing, FSDP) put into it.

    With the `model` the name belongs to, `module` is dropped exactly where a wrapper put it. Without it, as for a key in
    a file, only leading ones are.
    """
    parts = name.split(".")
    if model is None:
        while len(parts) > 1 and parts[0] in ("module", *_WRAPPER_PARTS):
            parts = parts[1:]
        return plain_name(".".join(parts))
    kept: list[str] = []
    here: object = model
    for part in parts:
        wrapped = part in _WRAPPER_PARTS or (part == "module" and isinstance(here, _WRAPPER_CLASSES))
        if not wrapped:
            kept.append(part)
        here = _child(here, part)
    return ".".join(kept)


def _child(module: object, part: str) -> object:
    """The submodule `part` without __getattr__, which wrappers forward to what they wrap."""
    return module._modules.get(part) if isinstance(module, nn.Module) else None


def named_parameters(model: nn.Module, *, tied: bool = False) -> Iterator[tuple[str, nn.Parameter]]:
    """Parameters by canonical name, in the model's order; with `tied`, under every name they have."""
    for name, parameter in model.named_parameters(remove_duplicate=not tied):
        yield canonical_name(name, model), parameter


def named_buffers(model: nn.Module, *, tied: bool = False) -> Iterator[tuple[str, Tensor]]:
    """Buffers by canonical name, in the model's order; with `tied`, under every name they have."""
    for name, buffer in model.named_buffers(remove_duplicate=not tied):
        yield canonical_name(name, model), buffer


def tied_groups(model: nn.Module) -> tuple[tuple[str, ...], ...]:
    """The sets of canonical names that are one and the same parameter, each and all in the model's order."""
    by_id: dict[int, list[str]] = {}
    for name, parameter in named_parameters(model, tied=True):
        names = by_id.setdefault(id(parameter), [])
        if name not in names:
            names.append(name)
    return tuple(tuple(names) for names in by_id.values() if len(names) > 1)
