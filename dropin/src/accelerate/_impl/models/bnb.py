"""Loading models with the layers of bitsandbytes, on top of hasten's quantization."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

from accelerate._impl import ambient
from accelerate._impl.environment.packages import (
    is_4bit_bnb_available,
    is_8bit_bnb_available,
)
from accelerate._impl.models.modeling import set_module_tensor_to_device
from accelerate._impl.settings.general import BnbQuantizationConfig
from accelerate._impl.surface.messages import message
from hasten.extensions import bigmodel
from hasten.extensions.bigmodel.device_map import MAP_METHODS
from hasten.extensions.bigmodel.offload_files import offload_weight
from hasten.extensions.quantization.quantize import (
    BnbSettings,
    chosen_linears,
    replace_linears,
)
from hasten.modules.surgery import linear_names

logger = logging.getLogger("accelerate.utils.bnb")
# Any in this file: devices and sizes as a user wrote them.


def load_and_quantize_model(
    model: nn.Module,
    bnb_quantization_config: BnbQuantizationConfig,
    weights_location: str | os.PathLike[str] | None = None,
    device_map: Any = None,
    no_split_module_classes: list[str] | None = None,
    max_memory: dict[Any, Any] | None = None,
    offload_folder: str | os.PathLike[str] | None = None,
    offload_state_dict: bool = False,
) -> nn.Module:
    """Return the model with its linear layers in four or eight bits on one device, filled from `weights_location` if it is empty.

    Weights are read in their full size to host memory and quantized layer by layer. The settings that divide a model
    over devices (`no_split_module_classes`, `max_memory`) and `offload_state_dict` have nothing to do on one device.
    """
    config = bnb_quantization_config
    device = _one_device(device_map)
    _check_library(config)
    skip = [
        *(config.skip_modules or get_keys_to_not_convert(model)),
        *(config.keep_in_fp32_modules or []),
    ]
    _fill_weights(model, weights_location)
    _cast_parameters(model, config)
    for linear_name in chosen_linears(model, skip):
        model.get_submodule(linear_name).to(device)
        replace_linears(model, [linear_name], _hasten_settings(config))
    return model.to(device)


def _check_library(config: BnbQuantizationConfig) -> None:
    if config.load_in_8bit and not is_8bit_bnb_available():
        raise ImportError(message("bnb_too_old", "8bit", " "))
    if config.load_in_4bit and not is_4bit_bnb_available():
        raise ValueError(message("bnb_too_old", "4bit", ""))


def _fill_weights(
    model: nn.Module, weights_location: str | os.PathLike[str] | None
) -> None:
    if not any(parameter.is_meta for parameter in model.parameters()):
        logger.warning(message("quantize_loaded"))
        return
    if weights_location is None:
        raise RuntimeError(message("quantize_without_weights"))
    bigmodel.load_checkpoint_in_model(model, Path(weights_location), {"": "cpu"})


def _cast_parameters(model: nn.Module, config: BnbQuantizationConfig) -> None:
    for parameter_name, parameter in model.named_parameters():
        if any(
            module_name in parameter_name
            for module_name in config.keep_in_fp32_modules or ()
        ):
            target_dtype = torch.float32
        else:
            target_dtype = config.torch_dtype
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(target_dtype)


def _hasten_settings(config: BnbQuantizationConfig) -> BnbSettings:
    quant_type: Any = (
        config.bnb_4bit_quant_type
    )  # one of "fp4" and "nf4", or __post_init__ raised
    return BnbSettings(
        kind="llm_int8" if config.load_in_8bit else quant_type,
        compute_dtype=config.bnb_4bit_compute_dtype,
        double_quantization=config.bnb_4bit_use_double_quant,
        outlier_threshold=config.llm_int8_threshold,
    )


def replace_with_bnb_layers(
    model: nn.Module,
    bnb_quantization_config: BnbQuantizationConfig,
    modules_to_not_convert: list[str] | None = None,
    current_key_name: list[str] | None = None,
) -> nn.Module:
    """Return the model with its linear layers exchanged for bitsandbytes', except those inside the modules named."""
    excluded_names = modules_to_not_convert or ()
    full_names = {}
    for linear_name in linear_names(model):
        if linear_name:
            full_names[linear_name] = ".".join([*(current_key_name or ()), linear_name])
    candidate_names = {}
    for linear_name, full_name in full_names.items():
        if linear_name.rpartition(".")[2] not in excluded_names:
            candidate_names[linear_name] = full_name
    names_to_replace = []
    for linear_name, full_name in candidate_names.items():
        if not any(
            excluded_name == full_name or f"{excluded_name}." in full_name
            for excluded_name in excluded_names
        ):
            names_to_replace.append(linear_name)
    if not names_to_replace:
        logger.warning(message("no_linear_layers"))
    return replace_linears(
        model, names_to_replace, _hasten_settings(bnb_quantization_config)
    )


def get_parameter_device(parameter: nn.Module) -> torch.device:
    return next(parameter.parameters()).device


def get_quantized_model_device_map(
    model: nn.Module,
    bnb_quantization_config: BnbQuantizationConfig,
    device_map: Any = None,
    max_memory: dict[Any, Any] | None = None,
    no_split_module_classes: list[str] | None = None,
) -> dict[str, Any]:
    return {"": _one_device(device_map)}


def quantize_and_offload_8bit(
    model: nn.Module,
    param: torch.Tensor,
    param_name: str,
    new_dtype: torch.dtype,
    offload_folder: Any,
    offload_index: dict[str, Any],
    fp16_statistics: torch.Tensor | None,
) -> None:
    """Write a weight and its 8-bit form to a folder, with an entry in the index; the model keeps no copy.

    Without `fp16_statistics` the weight is quantized here, row by row.
    """
    weight = param
    scales = fp16_statistics
    if scales is None:
        layer = nn.Linear(param.shape[1], param.shape[0], bias=False, dtype=new_dtype)
        layer.weight.data = param.to(ambient.device(), new_dtype)
        quantized_layer: Any = replace_linears(
            nn.Sequential(layer), ["0"], BnbSettings(kind="llm_int8")
        )[0]  # type: ignore[index]  # one layer
        weight = quantized_layer.weight.data
        scales = quantized_layer.weight.SCB
    offload_weight(weight.cpu(), param_name, offload_folder, index=offload_index)
    offload_weight(
        scales.cpu(),
        param_name.replace("weight", "SCB"),
        offload_folder,
        index=offload_index,
    )
    set_module_tensor_to_device(
        model, param_name, "meta", dtype=new_dtype, value=torch.empty(*param.shape)
    )


def _one_device(device_map: Any) -> torch.device:
    """Return the device all weights go to. Raises: ValueError when parts are to be elsewhere, or for an unknown way."""
    process_device = ambient.device()
    if device_map is None or device_map in MAP_METHODS:
        return process_device
    if isinstance(device_map, str):
        raise ValueError(message("unknown_device_map"))
    if isinstance(device_map, dict):
        target_devices = dict.fromkeys(device_map.values())
    else:
        target_devices = {device_map: None}
    if len(target_devices) > 1 or "disk" in target_devices:
        raise ValueError(
            message("quantized_on_several", ", ".join(map(str, target_devices)))
        )
    target_device = next(iter(target_devices))
    if isinstance(target_device, int):
        return torch.device(process_device.type, target_device)
    return torch.device(target_device)


def get_keys_to_not_convert(model: nn.Module) -> list[str]:
    """Modules to keep in their precision: those with tied weights, and the last one, which is the head where there is one."""
    tied = []
    for names in bigmodel.find_tied_parameters(model):
        for module_name in names:
            tied.append(module_name.rpartition(".")[0])
    prefix = getattr(model, "base_model_prefix", None)
    headless = prefix is not None and not hasattr(model, prefix)
    children = [module_name for module_name, _ in model.named_children()]
    if headless and not tied:
        return []
    return list(dict.fromkeys([*tied, *children[-1:]]))


def has_4bit_bnb_layers(model: object) -> bool:
    if hasattr(model, "modules"):
        modules = model.modules()
    else:
        modules = ()
    return any(type(module).__name__ == "Linear4bit" for module in modules)
