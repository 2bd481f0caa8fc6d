"""What users hook into saving and loading the state of a run, and how a hook is taken off again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from hasten.accelerator.run_state import RunParts

SaveHook = Callable[[list[nn.Module], list[dict[str, Any]], str], None]  # Any: state dicts hold extra state
LoadHook = Callable[[list[nn.Module], str], None]


class HookHandle:
    """Takes a hook off again."""

    def __init__(self, hooks: dict[int, Any], key: int) -> None:  # Any: hooks of either kind
        self._hooks = hooks
        self._key = key

    def remove(self) -> None:
        """Take the hook off; harmless to repeat."""
        self._hooks.pop(self._key, None)


def run_save_hooks(hooks: Mapping[int, SaveHook], parts: RunParts, folder: str) -> list[Mapping[str, Any] | None]:
    """What hooks left of each model's weights; None where there was none to ask."""
    models = list(parts.objects.models)
    if not hooks:
        return [None] * len(models)
    given: list[dict[str, Any]] = [dict(model.state_dict()) for model in parts.plain_models()]
    weights = list(given)
    for hook in list(hooks.values()):
        hook(list(models), weights, folder)
    if len(weights) == len(given):
        return list(weights)
    left = {id(weight) for weight in weights}
    return [weight if id(weight) in left else {} for weight in given]


def run_load_hooks(hooks: Mapping[int, LoadHook], parts: RunParts, folder: str) -> list[nn.Module | None]:
    """The models that hooks left to be loaded, None in place of the others."""
    plain, models = parts.plain_models(), list(parts.objects.models)
    given = list(models)
    for hook in list(hooks.values()):
        hook(models, folder)
    left = {id(model) for model in models}
    return [module if id(model) in left else None for module, model in zip(plain, given, strict=True)]
