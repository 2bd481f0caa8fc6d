"""fp8 training: linear layers computed in 8-bit floats by torchao or Transformer Engine, everything else in bf16."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor, nn

from hasten.config.sections.loop import (
    AORecipeKwargs,
    AutocastKwargs,
    FP8Config,
    PrecisionType,
    TERecipeKwargs,
)
from hasten.errors import PrecisionError
from hasten.modules import forwarding, surgery
from hasten.optional import available, need
from hasten.precision.autocast import AutocastPrecision
from hasten.precision.base import StepResult
from hasten.runtime.logs import get_logger

log = get_logger(__name__)

_MARK = "_hasten_fp8"


class Fp8Precision:
    """bf16 autocast around a model whose linear layers compute in fp8."""

    takes_half_weights = False
    spec: PrecisionType = "fp8"
    scaler: torch.amp.GradScaler | None = None

    def __init__(
        self,
        device: torch.device,
        config: FP8Config,
        kwargs: AutocastKwargs,
        sharded: bool = False,
    ) -> None:
        self.backend = choose_backend(config.backend)
        check_device(device, self.backend)
        self._device = device
        self._config = config
        self._sharded = sharded
        self._bf16 = AutocastPrecision("bf16", device, torch.bfloat16, kwargs)

    def convert(self, model: nn.Module) -> nn.Module:
        if not getattr(model, _MARK, False):
            names = self._convert_layers(model)
            if not names:
                raise PrecisionError(
                    "mixed_precision='fp8' found no linear layer to convert: all are filtered out, or their sizes are "
                    "not multiples of 16. The model would train in bf16 and cost more. Set skip_first_and_last=False, "
                    "pass a module_filter_func, or use mixed_precision='bf16'."
                )
            log.info(
                "fp8 (%s): %d linear layers converted, first %r",
                self.backend,
                len(names),
                names[0],
            )
            model.__dict__[_MARK] = True
        return self._bf16.convert(model)

    def restore(self, model: nn.Module) -> nn.Module:
        forwarding.restore(model, TEForward.tag)
        return self._bf16.restore(model)

    def forward_context(
        self, kwargs: AutocastKwargs | None = None
    ) -> AbstractContextManager[None]:
        return self._bf16.forward_context(kwargs)

    def scale(self, loss: Tensor) -> Tensor:
        return loss

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        return None

    def step(self, optimizer: torch.optim.Optimizer) -> StepResult:
        return self._bf16.step(optimizer)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        return None

    def _convert_layers(self, model: nn.Module) -> list[str]:
        if self.backend == "ao":
            return convert_ao(
                model,
                self._config.ao,
                emulate=self._device.type == "cpu",
                sharded=self._sharded,
            )
        return convert_te(model, self._config.te)


def choose_backend(backend: Literal["auto", "ao", "te"]) -> Literal["ao", "te"]:
    """Return the fp8 implementation to use; with "auto" the installed one, torchao first."""
    if backend != "auto":
        return backend
    if not available("torchao") and available("transformer_engine"):
        log.info("fp8 backend: Transformer Engine, because torchao is not installed")
        return "te"
    return "ao"


def check_device(device: torch.device, backend: Literal["ao", "te"]) -> None:
    """Raise if `device` has no fp8 arithmetic (torchao emulates it on the CPU)."""
    if device.type == "cpu" and backend == "ao":
        log.warning(
            "fp8 on the CPU is emulated: right for trying a script out, slower than float32"
        )
        return
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        if torch.version.hip is not None or (major, minor) >= (8, 9):
            return
        name = (
            f"{torch.cuda.get_device_name(device)} (compute capability {major}.{minor})"
        )
        if major >= 8:
            able = "'bf16', 'fp16' and 'no'"
        else:
            able = "'fp16' and 'no'"
        raise PrecisionError(
            f"mixed_precision='fp8' needs compute capability 8.9 or newer; {name} has no fp8 arithmetic. "
            f"Use one of {able} on this device."
        )
    raise PrecisionError(
        f"mixed_precision='fp8' ({backend}) cannot run on a {device.type} device; it needs an NVIDIA or AMD GPU with "
        f"fp8 arithmetic. Use mixed_precision='bf16' here"
        + (", or fp8 backend 'ao'." if device.type == "cpu" else ".")
    )


def layer_filter(
    model: nn.Module, ao_recipe: AORecipeKwargs
) -> Callable[[nn.Module, str], bool]:
    """Return a predicate of the layers to convert: the user's filter, or all linear layers but the first and the last."""
    if ao_recipe.module_filter_func is not None:
        return ao_recipe.module_filter_func
    linear_names = surgery.linear_names(model)
    if ao_recipe.skip_first_and_last and linear_names:
        skipped_names = {linear_names[0], linear_names[-1]}
    else:
        skipped_names = set()

    def is_converted(module: nn.Module, name: str) -> bool:
        if not isinstance(module, nn.Linear) or name in skipped_names:
            return False
        return module.out_features % 16 == 0 and (
            ao_recipe.pad_inner_dim or module.in_features % 16 == 0
        )

    return is_converted


def convert_ao(
    model: nn.Module, ao_recipe: AORecipeKwargs, emulate: bool, sharded: bool
) -> list[str]:
    """Convert the model's linear layers to torchao's with the same parameters; returns their names."""
    ao = need("torchao.float8", ">=0.12", "mixed_precision='fp8'")
    if ao_recipe.config is not None:
        config = ao_recipe.config
    elif ao_recipe.recipe_name is not None:
        config = ao.Float8LinearConfig.from_recipe_name(ao_recipe.recipe_name)
    else:
        gathers_in_float8 = ao_recipe.enable_fsdp_float8_all_gather
        config = ao.Float8LinearConfig(
            pad_inner_dim=ao_recipe.pad_inner_dim,
            enable_fsdp_float8_all_gather=gathers_in_float8,
        )
    if config.enable_fsdp_float8_all_gather and not sharded:
        config = dataclasses.replace(config, enable_fsdp_float8_all_gather=False)
    if emulate and not config.emulate:
        config = dataclasses.replace(config, emulate=True)
    is_converted = layer_filter(model, ao_recipe)
    converted_names: list[str] = []

    def choose_and_note(module: nn.Module, name: str) -> bool:
        is_chosen = (
            isinstance(module, nn.Linear)
            and bool(name)
            and is_converted(module, name)
            and not _is_chunked(module)
        )
        if is_chosen:
            converted_names.append(name)
        return is_chosen

    ao.convert_to_float8_training(
        model, module_filter_fn=choose_and_note, config=config
    )
    return converted_names


def _is_chunked(module: nn.Module) -> bool:
    """Return whether the layer is a head whose loss is computed from its weight, and so is not converted."""
    return forwarding.find(module, forwarding.LateHead.tag) is not None


class TEForward(forwarding.Forward):
    """Forward under Transformer Engine's fp8 autocast."""

    tag = "transformer_engine"

    # Any: a recipe of Transformer Engine
    def __init__(self, recipe: Any, in_eval: bool) -> None:
        self.recipe = recipe
        self.in_eval = in_eval

    # Any: the user's arguments and outputs
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        enabled = self.module.training or self.in_eval
        te = need("transformer_engine.pytorch")
        if enabled:
            context = te.fp8_autocast(enabled=True, fp8_recipe=self.recipe)
        else:
            context = nullcontext()
        with context:
            return self.inner(*args, **kwargs)


def convert_te(model: nn.Module, te_recipe_settings: TERecipeKwargs) -> list[str]:
    """Convert the model's linear layers to Transformer Engine's with the same parameters; returns their names."""
    te = need(
        "transformer_engine.pytorch", why="mixed_precision='fp8' with backend 'te'"
    )

    def is_converted(name: str, module: nn.Module) -> bool:
        has_fitting_size = (
            type(module) is nn.Linear
            and module.in_features % 16 == 0
            and module.out_features % 16 == 0
        )
        return has_fitting_size and not _is_chunked(module)

    def make_te_linear(name: str, module: nn.Module) -> nn.Module:
        assert isinstance(module, nn.Linear)
        te_linear: nn.Module = te.Linear(
            module.in_features,
            module.out_features,
            bias=module.bias is not None,
            params_dtype=module.weight.dtype,
        )
        for parameter_name, parameter in module.named_parameters(recurse=False):
            te_linear.register_parameter(parameter_name, parameter)
        return te_linear

    converted_names = surgery.swap_where(model, is_converted, make_te_linear)
    forwarding.replace(
        model,
        TEForward(
            te_recipe(te_recipe_settings), te_recipe_settings.use_autocast_during_eval
        ),
    )
    return converted_names


def te_recipe(
    te_recipe_settings: TERecipeKwargs,
) -> Any:  # Any: classes of Transformer Engine
    """Return the settings as a recipe of Transformer Engine."""
    recipe_module = need(
        "transformer_engine.common.recipe",
        why="mixed_precision='fp8' with backend 'te'",
    )
    fp8_format = getattr(recipe_module.Format, te_recipe_settings.fp8_format)
    if te_recipe_settings.use_mxfp8_block_scaling:
        return recipe_module.MXFP8BlockScaling(fp8_format=fp8_format)
    return recipe_module.DelayedScaling(
        margin=te_recipe_settings.margin,
        fp8_format=fp8_format,
        amax_history_len=te_recipe_settings.amax_history_len,
        amax_compute_algo=te_recipe_settings.amax_compute_algo,
        override_linear_precision=te_recipe_settings.override_linear_precision,
    )
