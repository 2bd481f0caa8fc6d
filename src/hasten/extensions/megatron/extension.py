"""What the extension offers: a strategy."""

from __future__ import annotations

from typing import Final

from hasten.extension import Extension

extension: Final = Extension(
    name="megatron",
    summary="Megatron-LM: language models on megatron-core's layers and schedules",
    settings={"megatron": "hasten.extensions.megatron.settings:MegatronLMPlugin"},
    public_names={
        "MegatronLMPlugin": "hasten.extensions.megatron.settings:MegatronLMPlugin"
    },
    strategies={"megatron": "hasten.extensions.megatron.strategy:STRATEGY"},
    strategy_packages={"megatron": "megatron"},
)
