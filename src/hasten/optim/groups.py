"""Parameters and options of the groups of an optimizer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn


# Any: options of an optimizer
def list_parameters(param_groups: Iterable[Mapping[str, Any]]) -> list[nn.Parameter]:
    """Return the parameters of all groups, in order."""
    parameters: list[nn.Parameter] = []
    for group in param_groups:
        parameters += group["params"]
    return parameters


def options_of(param_group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a group, without its parameters."""
    options = dict(param_group)
    del options["params"]
    return options


def list_groups_of_parameters(
    param_groups: Iterable[Mapping[str, Any]],
) -> list[Mapping[str, Any]]:
    """Return the group of each parameter, in the order of `list_parameters`."""
    groups_of_parameters: list[Mapping[str, Any]] = []
    for group in param_groups:
        groups_of_parameters += [group] * len(group["params"])
    return groups_of_parameters
