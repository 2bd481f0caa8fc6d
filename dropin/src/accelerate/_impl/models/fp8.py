"""fp8 through torchao or NVIDIA Transformer Engine, as functions on a model."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from accelerate._impl.environment.packages import torchao_required
from hasten.modules import forwarding, surgery
from hasten.optional import check_installed, need
from hasten.precision.fp8 import TEForward, te_recipe

# Any in this file: classes of torchao and Transformer Engine, and arguments and outputs of the user's model.


def find_first_last_linear_layers(model: nn.Module) -> tuple[str | None, str | None]:
    names: list[str | None] = [*surgery.linear_names(model)] or [None]
    return names[0], names[-1]


def filter_linear_layers(module: Any, fqn: str, layers_to_filter: list[str]) -> bool:
    """Return whether a layer can compute in fp8: a linear one of fitting sizes that is not in the list."""
    if isinstance(module, nn.Linear) and (
        module.in_features % 16 or module.out_features % 16
    ):
        return False
    return fqn not in layers_to_filter


def filter_first_and_last_linear_layers(module: Any, fqn: str) -> bool:
    return filter_linear_layers(
        module, fqn, list(filter(None, find_first_last_linear_layers(module)))
    )


@torchao_required
def has_ao_layers(model: nn.Module) -> bool:
    return any(type(module).__name__ == "Float8Linear" for module in model.modules())


@torchao_required
def convert_model_to_fp8_ao(
    model: nn.Module,
    config: Any = None,
    module_filter_func: Callable[..., bool] | None = None,
) -> None:
    first_and_last_names = []
    for name in find_first_last_linear_layers(model):
        if name:
            first_and_last_names.append(name)
    filter_module = module_filter_func or (
        lambda module, name: filter_linear_layers(module, name, first_and_last_names)
    )
    need("torchao.float8").convert_to_float8_training(
        model, module_filter_fn=filter_module, config=config
    )


def convert_model(
    model: nn.Module,
    to_transformer_engine: bool = True,
    _convert_linear: bool = True,
    _convert_ln: bool = True,
) -> None:
    """Exchange linear layers and layer norms for Transformer Engine's, or back, in place, keeping their parameters."""
    te = need("transformer_engine.pytorch", why="layers that compute in fp8")
    source, target = (nn, te) if to_transformer_engine else (te, nn)

    def is_wanted(name: str, old: Any) -> bool:
        if type(old) is source.Linear and _convert_linear:
            return source is te or (
                old.in_features % 16 == 0 and old.out_features % 16 == 0
            )
        return type(old) is source.LayerNorm and _convert_ln

    surgery.swap_where(model, is_wanted, partial(_module_like, source, target))


def _module_like(source: Any, target: Any, name: str, old: Any) -> nn.Module:
    """Return the same layer of another library, with the parameters of this one."""
    fresh: nn.Module
    if type(old) is source.Linear:
        fresh = target.Linear(
            old.in_features, old.out_features, bias=old.bias is not None, device="meta"
        )
    else:
        fresh = target.LayerNorm(tuple(old.weight.shape), eps=old.eps, device="meta")
    for key, parameter in old.named_parameters(recurse=False):
        fresh.register_parameter(key, parameter)
    return fresh


def contextual_fp8_autocast(
    model_forward: Any, fp8_recipe: Any, use_during_eval: bool = False
) -> Any:
    te = need("transformer_engine.pytorch", why="layers that compute in fp8")

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with te.fp8_autocast(
            enabled=self.training or use_during_eval, fp8_recipe=fp8_recipe
        ):
            return model_forward(*args, **kwargs)

    forward.__wrapped__ = model_forward  # type: ignore[attr-defined]  # where tools look for it
    return forward


def apply_fp8_autowrap(model: nn.Module, fp8_recipe_handler: Any) -> nn.Module:
    """Return the model, whose forward computes its Transformer Engine layers in fp8."""
    check_installed("transformer_engine", why="layers that compute in fp8")
    settings = fp8_recipe_handler.to_hasten()
    forwarding.replace(
        model, TEForward(te_recipe(settings), settings.use_autocast_during_eval)
    )
    return model


def has_transformer_engine_layers(model: nn.Module) -> bool:
    check_installed("transformer_engine", why="layers that compute in fp8")
    for module in model.modules():
        if type(module).__module__.startswith("transformer_engine"):
            return True
    return False
