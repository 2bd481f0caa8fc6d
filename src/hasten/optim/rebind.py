"""Transfer of an optimizer from one set of parameters to another by name, with its groups and state."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn

from hasten.errors import PrepareError
from hasten.modules.names import (
    is_dtensor,
    like_parameter,
    local_tensor,
    placements,
    plain_name,
    stage_part,
)

Convert = Callable[[str, str, Tensor, Tensor], Tensor]
"""(parameter name, state key, old value, new parameter) -> the value for the new parameter."""


@dataclass(frozen=True, slots=True)
class OptimizerRecord:
    """Groups and state of an optimizer, with parameter names in place of parameters."""

    groups: tuple[tuple[str, ...], ...]
    state: dict[str, dict[str, Any]]

    @classmethod
    def write(
        cls, optimizer: torch.optim.Optimizer, models: Sequence[nn.Module]
    ) -> OptimizerRecord:
        """Record the optimizer's groups and state by the names its parameters have in `models`.

        Raises: PrepareError naming the parameters that are in none of the models.
        """
        names: dict[Tensor, str] = {}
        for name, parameter in parameters_of(models)[0].items():
            names.setdefault(parameter, name)
        groups: list[tuple[str, ...]] = []
        for group in optimizer.param_groups:
            if not names.keys() >= set(group["params"]):
                raise _not_prepared(optimizer, names)
            groups.append(tuple(map(names.__getitem__, group["params"])))
        state = {}
        for parameter, values in optimizer.state.items():
            if parameter in names:
                state[names[parameter]] = dict(values)
        return cls(tuple(groups), state)

    def bind(
        self,
        optimizer: torch.optim.Optimizer,
        models: Sequence[nn.Module],
        convert: Convert | None = None,
    ) -> None:
        """Assign the parameters that have the recorded names in `models` now to the optimizer, with their state.

        The options of its groups are unchanged. When every parameter is still the same object, nothing changes.
        Raises: PrepareError naming a parameter that no longer exists.
        """
        parameters, away = parameters_of(models)
        fresh: list[list[Tensor]] = []
        old: list[Tensor] = []
        now: list[Tensor] = []
        for group, names in zip(optimizer.param_groups, self.groups, strict=True):
            kept = (
                names if not away else tuple(name for name in names if name not in away)
            )
            if not parameters.keys() >= set(kept):
                raise _gone(optimizer, kept, parameters)
            fresh.append(list(map(parameters.__getitem__, kept)))
            old += group["params"]
            now += fresh[-1]
        if list(map(id, old)) == list(map(id, now)):
            if optimizer.state:
                _move_state(optimizer)
            return
        for group, members in zip(optimizer.param_groups, fresh, strict=True):
            group["params"] = members
        for parameter in old:
            optimizer.state.pop(parameter, None)
        for name, values in self.state.items():
            if name in away:
                continue
            parameter = parameters[name]
            optimizer.state[parameter] = _converted(
                name, values, parameter, convert or convert_state
            )
        # LBFGS stores its one group's parameters a second time
        if "_params" in optimizer.__dict__:
            optimizer.__dict__["_params"] = optimizer.param_groups[0]["params"]


def parameters_of(models: Sequence[nn.Module]) -> tuple[dict[str, Tensor], set[str]]:
    """Return the parameters under all their names, and the names of those that other pipeline stages hold.

    A name is prefixed with its model's index, and has no wrappers' prefixes.
    """
    here: dict[str, Tensor] = {}
    everywhere = set[str]()
    for index, model in enumerate(models):
        part = stage_part(model)
        for name, parameter in model.named_parameters(remove_duplicate=False):
            plain = plain_name(name)
            here[f"{index}.{plain}"] = parameter
            if part is not None:
                here[f"{index}.{part.whole_name(plain)}"] = parameter
        if part is not None:
            everywhere.update(f"{index}.{name}" for name in part.parameters)
    return here, everywhere - here.keys()


def has_dtensors(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether parameters of the optimizer are DTensors."""
    return any(
        map(
            is_dtensor,
            chain.from_iterable(map(itemgetter("params"), optimizer.param_groups)),
        )
    )


def _move_state(optimizer: torch.optim.Optimizer) -> None:
    """Move state to the device of its parameters, which may have been moved in place since."""
    for parameter, values in optimizer.state.items():
        moved = {
            key: _as_its_parameter(
                value.to(parameter.device) if value.ndim else value, parameter
            )
            for key, value in values.items()
            if isinstance(value, Tensor)
        }
        values.update(moved)


def _converted(
    name: str, values: Mapping[str, Any], parameter: Tensor, convert: Convert
) -> dict[str, Any]:
    return {
        key: convert(name, key, value, parameter)
        if isinstance(value, Tensor)
        else value
        for key, value in values.items()
    }


def convert_state(name: str, key: str, value: Tensor, parameter: Tensor) -> Tensor:
    """Return a state tensor for the new parameter: sharded like it if the shapes match, else unchanged.

    Ranks: no communication; every rank cuts its shard out of the whole value it holds.
    """
    value = _as_its_parameter(value, parameter)
    if value.shape != parameter.shape or value.ndim == 0:
        return value
    if is_dtensor(parameter) and not is_dtensor(value):
        whole = value.to(parameter.device)
        spread: Callable[..., Tensor] = placements().distribute_tensor
        made = spread(
            whole, parameter.device_mesh, parameter.placements, src_data_rank=None
        )
        return like_parameter(local_tensor(made).to(parameter.device), parameter)
    return value.to(parameter.device)


def _as_its_parameter(value: Tensor, parameter: Tensor) -> Tensor:
    """Return state made for half-precision weights, in float32 if its parameter has become a float32 master."""
    half = value.dtype in (torch.float16, torch.bfloat16)
    return (
        value.float()
        if half and value.shape == parameter.shape and parameter.dtype == torch.float32
        else value
    )


def _gone(
    optimizer: torch.optim.Optimizer,
    names: Iterable[str],
    parameters: Mapping[str, Tensor],
) -> PrepareError:
    name = next(name for name in names if name not in parameters)
    return PrepareError(
        f"{type(optimizer).__name__} holds parameter {name!r}, which the prepared model no longer has; it cannot "
        "be updated. Create the optimizer after the change to the model, or pass a factory such as "
        "functools.partial(torch.optim.AdamW, lr=1e-3)."
    )


def _not_prepared(
    optimizer: torch.optim.Optimizer, names: Mapping[Tensor, str]
) -> PrepareError:
    unknown = list(_unknown(optimizer, names))
    shown = "; ".join(unknown[:5]) + (
        f"; and {len(unknown) - 5} more" if len(unknown) > 5 else ""
    )
    return PrepareError(
        f"{type(optimizer).__name__} has parameters of a model that is not prepared: {shown}. Their gradients "
        "would be neither synchronised nor on the right device. Pass their model to prepare() too, before or "
        "together with the optimizer."
    )


def _unknown(
    optimizer: torch.optim.Optimizer, names: Mapping[Tensor, str]
) -> Iterable[str]:
    for index, group in enumerate(optimizer.param_groups):
        known = group.get("param_names") or [None] * len(group["params"])
        for place, (parameter, label) in enumerate(
            zip(group["params"], known, strict=True)
        ):
            if parameter not in names:
                where = (
                    f"group {index}, parameter {place}, shape {tuple(parameter.shape)}"
                )
                yield f"{label!r} ({where})" if label else where
