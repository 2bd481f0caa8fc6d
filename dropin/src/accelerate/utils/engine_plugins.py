"""Settings of engines that follow later: they can be built and read, and are refused when a run would need them."""

from __future__ import annotations

from dataclasses import dataclass, make_dataclass
from dataclasses import field as dataclass_field
from typing import Any

import hasten
from accelerate import notyet

# Any in this file: values of settings that another engine defines.


_MEGATRON = [
    (name, Any, dataclass_field(default=hasten.MegatronLMPlugin.__dataclass_fields__[name].default))
    for name in hasten.MegatronLMPlugin.__dataclass_fields__
    if hasten.MegatronLMPlugin.__dataclass_fields__[name].default_factory.__class__.__name__ == "_MISSING_TYPE"
]


def _refuse_megatron(self: Any) -> None:
    notyet.refuse("utils.MegatronLMPlugin", notyet.MEGATRON)


MegatronLMPlugin = make_dataclass("MegatronLMPlugin", _MEGATRON, namespace={"__post_init__": _refuse_megatron})
MegatronLMPlugin.__module__ = __name__


@dataclass
class BnbQuantizationConfig:
    """Options of bitsandbytes."""

    load_in_8bit: bool = False
    llm_int8_threshold: float = 6.0
    load_in_4bit: bool = False
    bnb_4bit_quant_type: str = "fp4"
    bnb_4bit_use_double_quant: bool = False
    bnb_4bit_compute_dtype: str = "fp16"
    torch_dtype: Any = None
    skip_modules: list[str] | None = None
    keep_in_fp32_modules: list[str] | None = None

    def __post_init__(self) -> None:
        notyet.refuse("utils.BnbQuantizationConfig", notyet.QUANTIZATION)


add_model_config_to_megatron_parser = notyet.function("utils.add_model_config_to_megatron_parser", notyet.MEGATRON)
parse_bert_config = notyet.function("utils.dataclasses.parse_bert_config", notyet.MEGATRON)
parse_gpt2_config = notyet.function("utils.dataclasses.parse_gpt2_config", notyet.MEGATRON)
parse_t5_config = notyet.function("utils.dataclasses.parse_t5_config", notyet.MEGATRON)
parse_llama_config = notyet.function("utils.dataclasses.parse_llama_config", notyet.MEGATRON)
parse_glm4_moe_config = notyet.function("utils.dataclasses.parse_glm4_moe_config", notyet.MEGATRON)
