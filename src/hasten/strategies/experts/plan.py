"""Search for the modules that hold the experts of a mixture: by the names of a plan, or by their structure."""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from fnmatch import translate

from torch import nn

from hasten.errors import ConfigError, PrepareError
from hasten.runtime.mesh_plan import divisors

_EXPERTS_DESCRIPTION = (
    "a module of experts is called with hidden states [tokens, width], the experts chosen for each token [tokens, k] and "
    "their weights [tokens, k], and every one of its parameters has the experts as its first dimension"
)


def decide_experts(
    model: nn.Module, plan: str | Sequence[str], num_ranks: int
) -> dict[str, int]:
    """Return the number of experts of each module of experts, by name; the model is not changed.

    Raises: ConfigError for a plan that names modules that cannot be sharded; PrepareError if nothing is found.
    """
    if isinstance(plan, str):
        experts_by_module = stacked_experts(model)
    else:
        experts_by_module = _experts_by_plan(model, plan)
    if not experts_by_module:
        raise PrepareError(
            f"no module of {type(model).__name__} has experts that can be split over {num_ranks} ranks: {_EXPERTS_DESCRIPTION}. Name such modules with ParallelismConfig(ep_plan=('layers.*.experts',)), or set ep_size=1."
        )
    for name, number in experts_by_module.items():
        if number % num_ranks:
            raise ConfigError(
                f"{name!r} has {number} experts, which ep_size={num_ranks} does not divide, so some ranks would hold more; set "
                f"ep_size to one of {divisors(number)}."
            )
    _check_ties(model, experts_by_module)
    return experts_by_module


def stacked_experts(model: nn.Module) -> dict[str, int]:
    """Return modules with a `num_experts` attribute, as in transformers, that equals the first size of their weights."""
    numbers: dict[str, int] = {}
    for module_name, module in model.named_modules():
        number = getattr(module, "num_experts", None)
        is_stack = (
            module_name
            and isinstance(number, int)
            and number > 1
            and reason_against_sharding(module) is None
        )
        if is_stack and next(module.parameters()).shape[0] == number:
            numbers[module_name] = number
    return numbers


def _experts_by_plan(model: nn.Module, plan: Sequence[str]) -> dict[str, int]:
    """Return the modules that match the patterns. Raises: ConfigError for a module without experts."""
    modules = {name: module for name, module in model.named_modules() if name}
    numbers: dict[str, int] = {}
    for pattern in plan:
        matches = re.compile(translate(pattern)).match
        matching_names = [name for name in modules if matches(name)]
        if not matching_names:
            raise ConfigError(
                f"ep_plan: {pattern!r} matches no module of {type(model).__name__}, so it would have no effect; modules with experts "
                f"are {', '.join(n for n, m in modules.items() if reason_against_sharding(m) is None) or 'none'}."
            )
        for name in matching_names:
            if (reason := reason_against_sharding(modules[name])) is not None:
                raise ConfigError(
                    f"ep_plan: {name!r} ({type(modules[name]).__name__}) cannot be split over ranks: {reason}. Here {_EXPERTS_DESCRIPTION}. "
                    "Change the pattern, or implement the experts in that form."
                )
            numbers[name] = next(modules[name].parameters()).shape[0]
    return numbers


def reason_against_sharding(module: nn.Module) -> str | None:
    """Return the reason that a module's experts cannot be sharded; None if they can."""
    if isinstance(module, nn.ModuleList):
        return "it is a list of modules that are called one after the other, so one rank would compute while the others wait"
    direct_parameters = dict(module.named_parameters(recurse=False))
    if not direct_parameters:
        return "it has no direct parameters"
    if len(direct_parameters) < len(list(module.parameters())):
        return "modules inside it have parameters too"
    flat_names = []
    for name, parameter in direct_parameters.items():
        if parameter.ndim < 2:
            flat_names.append(name)
    if flat_names:
        return f"{flat_names[0]!r} has {direct_parameters[flat_names[0]].ndim} dimension(s), and a stack of weights has at least two"
    sizes = {name: parameter.shape[0] for name, parameter in direct_parameters.items()}
    if len(set(sizes.values())) > 1:
        return f"the first dimensions of its parameters differ ({', '.join(f'{n}: {s}' for n, s in sizes.items())})"
    if next(module.buffers(), None) is not None:
        return "it has buffers, which would not be split"
    return _wrong_arguments(module)


def _wrong_arguments(module: nn.Module) -> str | None:
    required = []
    for parameter in inspect.signature(module.forward).parameters.values():
        if parameter.default is parameter.empty and parameter.kind in (
            parameter.POSITIONAL_ONLY,
            parameter.POSITIONAL_OR_KEYWORD,
        ):
            required.append(parameter.name)
    if len(required) == 3:
        return None
    return f"its forward takes ({', '.join(required)})"


def _check_ties(model: nn.Module, experts_by_module: dict[str, int]) -> None:
    """Raise if a stack of experts has a second name, under which it would not be sharded."""
    names_by_id: dict[int, str] = {}
    for parameter_name, parameter in model.named_parameters(remove_duplicate=False):
        first_name = names_by_id.setdefault(id(parameter), parameter_name)
        expert_names = []
        for tied_name in (first_name, parameter_name):
            if tied_name.rpartition(".")[0] in experts_by_module:
                expert_names.append(tied_name)
        if first_name != parameter_name and expert_names:
            raise ConfigError(
                f"{first_name!r} and {parameter_name!r} are one tied tensor, and tied experts are not supported in this version. Untie the weights, or "
                "set ep_size=1."
            )
