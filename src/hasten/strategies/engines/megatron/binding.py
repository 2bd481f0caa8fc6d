"""Which model an optimizer trains on a Megatron engine, and its groups over the engine's parameters."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn
from torch.optim import Optimizer

from hasten.errors import PrepareError
from hasten.prepare_args import Item
from hasten.strategies.engines.megatron.model import MegatronModel


def owner_of(models: list[Item], optimizers: list[Item], taken: bool) -> Item | None:
    """The one model that is trained. Raises: PrepareError where models and optimizers are not one and one."""
    if not optimizers:
        return None
    params = {id(p) for item in optimizers for group in item.value.param_groups for p in group["params"]}
    owners = [item for item in models if params & {id(p) for p in item.value.parameters()}]
    if len(owners) != 1 or len(optimizers) != 1 or taken:
        raise PrepareError(
            f"{len(optimizers)} optimizers with parameters of {len(owners)} models were prepared"
            f"{', after another one' if taken else ''}; an engine trains one model with one optimizer. Prepare one model together "
            "with an optimizer over its parameters."
        )
    return owners[0]


def groups_by_name(module: nn.Module, optimizer: Optimizer) -> dict[str, int | None]:
    """The optimizer's group of each tensor of the Hub layout; None for one that is frozen.

    Raises: PrepareError for a trainable parameter that no group holds.
    """
    number = {id(p): index for index, group in enumerate(optimizer.param_groups) for p in group["params"]}
    found: dict[str, int | None] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if parameter.requires_grad and id(parameter) not in number:
            raise PrepareError(
                f"{name} takes gradients, but the optimizer does not hold it; the engine clips and updates all it trains. Add it to "
                "the optimizer, or call requires_grad_(False) on it."
            )
        found[name] = number.get(id(parameter)) if parameter.requires_grad else None
    return found


def bind(optimizer: Optimizer, model: MegatronModel, groups: Mapping[str, int | None]) -> None:
    """Give the optimizer this rank's parameters in the groups their origins had."""
    members: list[list[nn.Parameter]] = [[] for _ in optimizer.param_groups]
    for name, parameter in model.held.items():
        origins = {groups[hub] for hub in model.entries[name].hub if hub in groups}
        if len(origins) != 1:
            raise PrepareError(
                f"{', '.join(model.entries[name].hub)} are one tensor in the engine, and lie in different parameter groups (or only some "
                "are frozen), whose options cannot all hold; put them into one group."
            )
        if (group := origins.pop()) is None:
            raise PrepareError(
                f"{model.entries[name].hub[0]} is frozen, and the engine's gradient buffers hold every parameter of the model; train all "
                "parameters, or use strategy='fsdp'."
            )
        members[group].append(parameter)
    for own, params in zip(optimizer.param_groups, members, strict=True):
        own["params"] = params
