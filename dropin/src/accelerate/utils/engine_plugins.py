"""Settings of engines that follow later: they can be built and read, and are refused when a run would need them."""

from __future__ import annotations

from dataclasses import field as dataclass_field
from dataclasses import make_dataclass
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


add_model_config_to_megatron_parser = notyet.function("utils.add_model_config_to_megatron_parser", notyet.MEGATRON)
parse_bert_config = notyet.function("utils.dataclasses.parse_bert_config", notyet.MEGATRON)
parse_gpt2_config = notyet.function("utils.dataclasses.parse_gpt2_config", notyet.MEGATRON)
parse_t5_config = notyet.function("utils.dataclasses.parse_t5_config", notyet.MEGATRON)
parse_llama_config = notyet.function("utils.dataclasses.parse_llama_config", notyet.MEGATRON)
parse_glm4_moe_config = notyet.function("utils.dataclasses.parse_glm4_moe_config", notyet.MEGATRON)
