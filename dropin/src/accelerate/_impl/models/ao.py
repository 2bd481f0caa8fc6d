"""fp8 through torchao, as functions on a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from accelerate._impl.environment.packages import torchao_required

# Any in this file: torchao's own objects.


def find_first_last_linear_layers(model: nn.Module) -> tuple[str | None, str | None]:
    """The names of the first and the last linear layer."""
    names = [name for name, part in model.named_modules() if isinstance(part, nn.Linear)]
    return (names[0], names[-1]) if names else (None, None)


def filter_linear_layers(module: Any, fqn: str, layers_to_filter: list[str]) -> bool:
    """Whether a layer can compute in fp8: a linear one of fitting sizes that is not in the list."""
    if isinstance(module, nn.Linear) and (module.in_features % 16 or module.out_features % 16):
        return False
    return fqn not in layers_to_filter


def filter_first_and_last_linear_layers(module: Any, fqn: str) -> bool:
    """As a filter for torchao: leave the first and last linear layer alone."""
    return filter_linear_layers(module, fqn, list(filter(None, find_first_last_linear_layers(module))))


@torchao_required
def has_ao_layers(model: nn.Module) -> bool:
    """Whether torchao has converted a part of the model."""
    return any(type(part).__name__ == "Float8Linear" for part in model.modules())


@torchao_required
def convert_model_to_fp8_ao(
    model: nn.Module, config: Any = None, module_filter_func: Callable[..., bool] | None = None
) -> None:
    """Convert a model's linear layers to fp8, in place."""
    from torchao.float8 import convert_to_float8_training  # an optional package

    ends = [name for name in find_first_last_linear_layers(model) if name]
    chosen = module_filter_func or (lambda part, name: filter_linear_layers(part, name, ends))
    convert_to_float8_training(model, module_filter_fn=chosen, config=config)
