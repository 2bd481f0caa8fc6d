"""Transfer of an optimizer from one set of parameters to another by name, with its groups and state."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hasten.errors import PrepareError
from hasten.modules.names import is_dtensor, placements, plain_name, stage_part

Convert = Callable[[str, str, Tensor, Tensor], Tensor]
"""(parameter name, state key, old value, new parameter) -> the value for the new parameter."""


@dataclass(frozen=True, slots=True)
class OptimizerRecord:
    """Groups and state of an optimizer, with parameter names in place of parameters."""

    groups: tuple[tuple[str, ...], ...]
    state: dict[str, dict[str, Any]]

    @classmethod
    def write(cls, optimizer: torch.optim.Optimizer, models: Sequence[nn.Module]) -> OptimizerRecord:
        """Record the optimizer's groups and state by the names its parameters have in `models`.

        Raises: PrepareError naming the parameters that are in none of the models.
        """
        names = {parameter: name for name, parameter in reversed(list(named(models)))}  # the first name wins
        if strangers := list(_strangers(optimizer, names)):
            shown = "; ".join(strangers[:5]) + (f"; and {len(strangers) - 5} more" if len(strangers) > 5 else "")
            raise PrepareError(
                f"{type(optimizer).__name__} has parameters of a model that is not prepared: {shown}. Their gradients "
                "would be neither synchronised nor on the right device. Pass their model to prepare() too, before or "
                "together with the optimizer."
            )
        groups = tuple(tuple(names[p] for p in group["params"]) for group in optimizer.param_groups)
        return cls(groups, {names[p]: dict(values) for p, values in optimizer.state.items() if p in names})

    def bind(
        self, optimizer: torch.optim.Optimizer, models: Sequence[nn.Module], convert: Convert | None = None
    ) -> None:
        """Assign the parameters that have the recorded names in `models` now to the optimizer, with their state.

        The options of its groups are unchanged. When every parameter is still the same object, nothing changes.
        Raises: PrepareError naming a parameter that no longer exists.
        """
        parameters = dict(named(models))
        away = _elsewhere(models, parameters)
        fresh = [[_find(name, parameters, optimizer) for name in group if name not in away] for group in self.groups]
        old = [p for group in optimizer.param_groups for p in group["params"]]
        now = [p for group in fresh for p in group]
        if len(old) == len(now) and all(a is b for a, b in zip(old, now, strict=True)):
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
            optimizer.state[parameter] = _converted(name, values, parameter, convert or convert_state)
        if "_params" in optimizer.__dict__:  # LBFGS stores its one group's parameters a second time
            optimizer.__dict__["_params"] = optimizer.param_groups[0]["params"]


def named(models: Sequence[nn.Module]) -> Iterator[tuple[str, Tensor]]:
    """Yield every parameter under every name, prefixed with its model's index and without wrappers' prefixes."""
    for index, model in enumerate(models):
        part = stage_part(model)
        for name, parameter in model.named_parameters(remove_duplicate=False):
            yield f"{index}.{plain_name(name)}", parameter
            if part is not None and (whole := part.whole_name(plain_name(name))) != plain_name(name):
                yield f"{index}.{whole}", parameter


def _elsewhere(models: Sequence[nn.Module], here: Mapping[str, Tensor]) -> set[str]:
    """Return the recorded names of the parameters that other pipeline stages hold."""
    parts = ((index, stage_part(model)) for index, model in enumerate(models))
    return {f"{index}.{name}" for index, part in parts if part is not None for name in part.parameters} - here.keys()


def _move_state(optimizer: torch.optim.Optimizer) -> None:
    """Move state to the device of its parameters, which may have been moved in place since."""
    for parameter, values in optimizer.state.items():
        moved = {
            key: _as_its_parameter(value.to(parameter.device) if value.ndim else value, parameter)
            for key, value in values.items()
            if isinstance(value, Tensor)
        }
        values.update(moved)


def _converted(name: str, values: Mapping[str, Any], parameter: Tensor, convert: Convert) -> dict[str, Any]:
    return {
        key: convert(name, key, value, parameter) if isinstance(value, Tensor) else value
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
        return spread(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
    return value.to(parameter.device)


def _as_its_parameter(value: Tensor, parameter: Tensor) -> Tensor:
    """Return state made for half-precision weights, in float32 if its parameter has become a float32 master."""
    half = value.dtype in (torch.float16, torch.bfloat16)
    return value.float() if half and value.shape == parameter.shape and parameter.dtype == torch.float32 else value


def _find(name: str, parameters: Mapping[str, Tensor], optimizer: torch.optim.Optimizer) -> Tensor:
    if name not in parameters:
        raise PrepareError(
            f"{type(optimizer).__name__} holds parameter {name!r}, which the prepared model no longer has; it cannot "
            "be updated. Create the optimizer after the change to the model, or pass a factory such as "
            "functools.partial(torch.optim.AdamW, lr=1e-3)."
        )
    return parameters[name]


def _strangers(optimizer: torch.optim.Optimizer, names: Mapping[Tensor, str]) -> Iterable[str]:
    for index, group in enumerate(optimizer.param_groups):
        known = group.get("param_names") or [None] * len(group["params"])
        for place, (parameter, label) in enumerate(zip(group["params"], known, strict=True)):
            if parameter not in names:
                where = f"group {index}, parameter {place}, shape {tuple(parameter.shape)}"
                yield f"{label!r} ({where})" if label else where
