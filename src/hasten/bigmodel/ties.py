"""Weights that several modules share: finding them, and sharing them again after they were loaded one by one."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from hasten.modules.names import tied_groups
from hasten.modules.surgery import parent_of


def find_tied_parameters(model: nn.Module) -> list[list[str]]:
    """The groups of names that are one and the same parameter."""
    return [sorted(group) for group in tied_groups(model)]


def retie_parameters(model: nn.Module, tied_params: Sequence[Sequence[str]]) -> None:
    """Make the names of each group one parameter again: the one that holds numbers."""
    for group in tied_params:
        kept = next((tensor for name in group if not (tensor := tensor_of(model, name)).is_meta), None)
        if kept is None:
            continue
        for name in group:
            owner, last = parent_of(model, name)
            table = owner._parameters if last in owner._parameters else owner._buffers
            table[last] = kept  # type: ignore[assignment]  # a parameter in the one table, a buffer in the other


def tensor_of(model: nn.Module, name: str) -> Tensor:
    """The parameter or buffer called `name`."""
    owner, last = parent_of(model, name)
    found = owner._parameters.get(last)
    if found is None:
        found = owner._buffers.get(last)  # type: ignore[assignment]
    if found is None:
        raise AttributeError(f"{type(owner).__name__} has no parameter or buffer {last!r}")
    return found
