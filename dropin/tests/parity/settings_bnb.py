"""Options of quantization that contradict each other."""

from accelerate.utils import BnbQuantizationConfig


def run() -> object:
    error_names = []
    for options in (
        {"load_in_8bit": True, "load_in_4bit": True},
        {},
        {"load_in_4bit": True, "bnb_4bit_quant_type": "x"},
    ):
        try:
            BnbQuantizationConfig(**options)
            error_names.append(None)
        except ValueError as error:
            error_names.append(type(error).__name__)
    config = BnbQuantizationConfig(
        load_in_4bit=True, bnb_4bit_compute_dtype="bf16", torch_dtype="fp16"
    )
    return [
        error_names,
        str(config.bnb_4bit_compute_dtype),
        str(config.torch_dtype),
        str(config.target_dtype),
    ]


PROCESSES = (1,)
