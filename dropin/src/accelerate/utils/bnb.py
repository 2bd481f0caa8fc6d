"""Quantization: follows later."""

from accelerate import notyet

get_keys_to_not_convert = notyet.function("utils.get_keys_to_not_convert", notyet.QUANTIZATION)
get_parameter_device = notyet.function("utils.get_parameter_device", notyet.QUANTIZATION)
get_quantized_model_device_map = notyet.function("utils.get_quantized_model_device_map", notyet.QUANTIZATION)
load_and_quantize_model = notyet.function("utils.load_and_quantize_model", notyet.QUANTIZATION)
quantize_and_offload_8bit = notyet.function("utils.quantize_and_offload_8bit", notyet.QUANTIZATION)
replace_with_bnb_layers = notyet.function("utils.replace_with_bnb_layers", notyet.QUANTIZATION)


def has_4bit_bnb_layers(model: object) -> bool:
    """Whether bitsandbytes has quantized a part of the model."""
    modules = model.modules() if hasattr(model, "modules") else ()
    return any(type(part).__name__ == "Linear4bit" for part in modules)
