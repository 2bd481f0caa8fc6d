"""What the extension offers: a strategy."""

from __future__ import annotations

from hasten.extension import Extension

extension = Extension(
    name="megatron",
    summary="Megatron-LM: language models on megatron-core's layers and schedules",
    strategies={"megatron": "hasten.extensions.megatron.strategy:STRATEGY"},
)
