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
        for param_group in optimizer.param_groups:
            if not names.keys() >= set(param_group["params"]):
                raise _unprepared_model_error(optimizer, names)
            groups.append(tuple(map(names.__getitem__, param_group["params"])))
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
        parameters, remote_names = parameters_of(models)
        new_groups: list[list[Tensor]] = []
        old_parameters: list[Tensor] = []
        new_parameters: list[Tensor] = []
        for param_group, names in zip(optimizer.param_groups, self.groups, strict=True):
            if not remote_names:
                local_names = names
            else:
                local_names = tuple(name for name in names if name not in remote_names)
            if not parameters.keys() >= set(local_names):
                raise _missing_parameter_error(optimizer, local_names, parameters)
            new_groups.append(list(map(parameters.__getitem__, local_names)))
            old_parameters += param_group["params"]
            new_parameters += new_groups[-1]
        if list(map(id, old_parameters)) == list(map(id, new_parameters)):
            if optimizer.state:
                _move_state(optimizer)
            return
        for param_group, members in zip(
            optimizer.param_groups, new_groups, strict=True
        ):
            param_group["params"] = members
        for parameter in old_parameters:
            optimizer.state.pop(parameter, None)
        for name, values in self.state.items():
            if name in remote_names:
                continue
            parameter = parameters[name]
            optimizer.state[parameter] = _convert_values(
                name, values, parameter, convert or convert_state
            )
        # LBFGS stores its one group's parameters a second time
        if "_params" in optimizer.__dict__:
            optimizer.__dict__["_params"] = optimizer.param_groups[0]["params"]


def parameters_of(models: Sequence[nn.Module]) -> tuple[dict[str, Tensor], set[str]]:
    """Return the parameters under all their names, and the names of those that other pipeline stages hold.

    A name is prefixed with its model's index, and has no wrappers' prefixes.
    """
    local_parameters: dict[str, Tensor] = {}
    stage_names = set[str]()
    for index, model in enumerate(models):
        stage = stage_part(model)
        for name, parameter in model.named_parameters(remove_duplicate=False):
            plain = plain_name(name)
            local_parameters[f"{index}.{plain}"] = parameter
            if stage is not None:
                local_parameters[f"{index}.{stage.whole_name(plain)}"] = parameter
        if stage is not None:
            stage_names.update(f"{index}.{name}" for name in stage.parameters)
    return local_parameters, stage_names - local_parameters.keys()


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


def _convert_values(
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
        whole_state = value.to(parameter.device)
        distribute: Callable[..., Tensor] = placements().distribute_tensor
        sharded_state = distribute(
            whole_state, parameter.device_mesh, parameter.placements, src_data_rank=None
        )
        return like_parameter(
            local_tensor(sharded_state).to(parameter.device), parameter
        )
    return value.to(parameter.device)


def _as_its_parameter(value: Tensor, parameter: Tensor) -> Tensor:
    """Return state made for half-precision weights, in float32 if its parameter has become a float32 master."""
    half = value.dtype in (torch.float16, torch.bfloat16)
    if half and value.shape == parameter.shape and parameter.dtype == torch.float32:
        return value.float()
    return value


def _missing_parameter_error(
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


def _unprepared_model_error(
    optimizer: torch.optim.Optimizer, names: Mapping[Tensor, str]
) -> PrepareError:
    unknown_parameters = list(_describe_unknown(optimizer, names))
    listed_parameters = "; ".join(unknown_parameters[:5]) + (
        f"; and {len(unknown_parameters) - 5} more"
        if len(unknown_parameters) > 5
        else ""
    )
    return PrepareError(
        f"{type(optimizer).__name__} has parameters of a model that is not prepared: {listed_parameters}. Their gradients "
        "would be neither synchronised nor on the right device. Pass their model to prepare() too, before or "
        "together with the optimizer."
    )


def _describe_unknown(
    optimizer: torch.optim.Optimizer, names: Mapping[Tensor, str]
) -> Iterable[str]:
    for index, param_group in enumerate(optimizer.param_groups):
        labels = param_group.get("param_names") or [None] * len(param_group["params"])
        for position, (parameter, label) in enumerate(
            zip(param_group["params"], labels, strict=True)
        ):
            if parameter not in names:
                location = f"group {index}, parameter {position}, shape {tuple(parameter.shape)}"
                yield f"{label!r} ({location})" if label else location
