"""The settings of bitsandbytes, checked as the original checks them."""

from dataclasses import dataclass
from typing import Any, Final

import torch

from accelerate._impl.enums import CustomDtype

# Any in this file: values as a user wrote them.

_KINDS: Final[tuple[tuple[str, Any, str], ...]] = (
    ("load_in_8bit load_in_4bit bnb_4bit_use_double_quant", bool, "a boolean"),
    ("llm_int8_threshold", (int, float), "a float or an int"),
    ("skip_modules keep_in_fp32_modules", (list, type(None)), "a list of strings"),
)
_DTYPES: Final = (("fp32", torch.float32), ("fp16", torch.float16), ("bf16", torch.bfloat16))


@dataclass
class BnbQuantizationConfig:
    """Which layers bitsandbytes quantizes, and how."""

    load_in_8bit: bool = False
    llm_int8_threshold: float = 6.0
    load_in_4bit: bool = False
    bnb_4bit_quant_type: str = "fp4"
    bnb_4bit_use_double_quant: bool = False
    bnb_4bit_compute_dtype: Any = "fp16"
    torch_dtype: Any = None
    skip_modules: list[str] | None = None
    keep_in_fp32_modules: list[str] | None = None

    def __post_init__(self) -> None:
        for names, kind, words in _KINDS:
            for name in names.split():
                if not isinstance(getattr(self, name), kind):
                    raise ValueError(f"{name.replace('fp32', 'fp_32')} must be {words}")
        self._check_bits()
        self.bnb_4bit_compute_dtype = _dtype("bnb_4bit_compute_dtype", self.bnb_4bit_compute_dtype)
        if self.torch_dtype is None:
            self.torch_dtype = self.bnb_4bit_compute_dtype if self.load_in_4bit else torch.float16
        self.torch_dtype = _dtype("torch_dtype", self.torch_dtype)
        self.target_dtype = CustomDtype.INT4 if self.load_in_4bit else torch.int8

    def _check_bits(self) -> None:
        if self.load_in_8bit == self.load_in_4bit:
            raise ValueError(f"load_in_4bit and load_in_8bit can't be both {self.load_in_8bit}")
        if self.bnb_4bit_quant_type not in ("fp4", "nf4"):
            raise ValueError(f"bnb_4bit_quant_type must be in ['fp4','nf4'] but found {self.bnb_4bit_quant_type}")


def _dtype(name: str, value: Any) -> torch.dtype:
    if isinstance(value, torch.dtype):
        return value
    if value not in dict(_DTYPES):
        raise ValueError(f"{name} must be in ['fp32','fp16','bf16'] but found {value}")
    return dict(_DTYPES)[value]
