"""What users hook into saving and loading the state of a run, and how a hook is taken off again.

Hooks are given the users' own models, not what wraps them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from hasten.checkpoint.rank_agreement import Agreement
from hasten.errors import HookError
from hasten.state.run_state import RunParts

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


def run_save_hooks(
    hooks: Mapping[int, SaveHook], parts: RunParts, folder: str, together: Agreement
) -> list[Mapping[str, Any] | None]:
    """What hooks left of each model's weights; None where there was none to ask. Ranks: every rank.

    Scripts write models in a format of their own, and take the weights out, on the main process alone: what is taken out
    there is taken out on every rank, and nothing else is.
    """
    models = list(parts.plain_models())
    given: list[dict[str, Any]] = [dict(model.state_dict()) for model in models] if hooks else []
    weights = list(given)
    for hook in list(hooks.values()):
        _call(hook, list(models), weights, folder)
    own: list[Mapping[str, Any] | None] = [None] * len(models)
    kept = [True] * len(models)
    if len(weights) == len(given):
        own = list(weights) or own
    else:
        left = {id(weight) for weight in weights}
        own, kept = list(given), [id(weight) in left for weight in given]
    on_main: list[bool] = together.share(kept)[0]
    if len(on_main) != len(own):  # ranks hold different models: refused, by name, when the state is compared
        return own
    return [weight if stays else {} for weight, stays in zip(own, on_main, strict=True)]


def run_load_hooks(hooks: Mapping[int, LoadHook], parts: RunParts, folder: str) -> list[nn.Module | None]:
    """The models that hooks left to be loaded, None in place of the others."""
    given = list(parts.plain_models())
    models = list(given)
    for hook in list(hooks.values()):
        _call(hook, models, folder)
    left = {id(model) for model in models}
    return [model if id(model) in left else None for model in given]


def _call(hook: Callable[..., None], *given: Any) -> None:  # Any: what hooks of either kind are given
    try:
        hook(*given)
    except Exception as error:  # of any type: other ranks must hear of it
        name = getattr(hook, "__qualname__", type(hook).__qualname__)
        raise HookError(f"the hook {name} raised {type(error).__name__}: {error}") from error
