"""Options of quantization that contradict each other."""

from accelerate.utils import BnbQuantizationConfig


def run() -> object:
    found = []
    for options in (
        {"load_in_8bit": True, "load_in_4bit": True},
        {},
        {"load_in_4bit": True, "bnb_4bit_quant_type": "x"},
    ):
        try:
            BnbQuantizationConfig(**options)
            found.append(None)
        except ValueError as error:
            found.append(type(error).__name__)
    made = BnbQuantizationConfig(
        load_in_4bit=True, bnb_4bit_compute_dtype="bf16", torch_dtype="fp16"
    )
    return [
        found,
        str(made.bnb_4bit_compute_dtype),
        str(made.torch_dtype),
        str(made.target_dtype),
    ]


PROCESSES = (1,)
