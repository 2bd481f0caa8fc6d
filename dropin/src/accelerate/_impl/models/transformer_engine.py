"""fp8 through NVIDIA Transformer Engine, as functions on a model."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn

from hasten.modules import forwarding, surgery
from hasten.optional import need
from hasten.precision.fp8 import TEForward, te_recipe

# Any in this file: Transformer Engine's own classes, and arguments and outputs of the user's model.


def convert_model(
    model: nn.Module, to_transformer_engine: bool = True, _convert_linear: bool = True, _convert_ln: bool = True
) -> None:
    """Exchange linear layers and layer norms for Transformer Engine's, or back, in place, keeping their parameters."""
    te = need("transformer_engine.pytorch", why="layers that compute in fp8")
    source, target = (nn, te) if to_transformer_engine else (te, nn)

    def wanted(name: str, old: Any) -> bool:
        if type(old) is source.Linear and _convert_linear:
            return source is te or (old.in_features % 16 == 0 and old.out_features % 16 == 0)
        return type(old) is source.LayerNorm and _convert_ln

    surgery.swap_where(model, wanted, partial(_like, source, target))


def _like(source: Any, target: Any, name: str, old: Any) -> nn.Module:
    """The same layer of another library, with the parameters of this one."""
    if type(old) is source.Linear:
        fresh = target.Linear(old.in_features, old.out_features, bias=old.bias is not None, device="meta")
    else:
        fresh = target.LayerNorm(tuple(old.weight.shape), eps=old.eps, device="meta")
    for key, parameter in old.named_parameters(recurse=False):
        fresh.register_parameter(key, parameter)
    made: nn.Module = fresh
    return made


def contextual_fp8_autocast(model_forward: Any, fp8_recipe: Any, use_during_eval: bool = False) -> Any:
    """A method that calls `model_forward` in fp8, while evaluating only with `use_during_eval`."""
    te = need("transformer_engine.pytorch", why="layers that compute in fp8")

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with te.fp8_autocast(enabled=self.training or use_during_eval, fp8_recipe=fp8_recipe):
            return model_forward(*args, **kwargs)

    forward.__wrapped__ = model_forward  # type: ignore[attr-defined]  # where tools look for it
    return forward


def apply_fp8_autowrap(model: nn.Module, fp8_recipe_handler: Any) -> nn.Module:
    """The model, whose forward computes its Transformer Engine layers in fp8."""
    settings = fp8_recipe_handler.to_hasten()
    forwarding.replace(model, TEForward(te_recipe(settings), settings.use_autocast_during_eval))
    return model


def has_transformer_engine_layers(model: nn.Module) -> bool:
    """Whether a part of the model is Transformer Engine's."""
    return any(type(part).__module__.startswith("transformer_engine") for part in model.modules())
