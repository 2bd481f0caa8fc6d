"""Comparison of weights and state that must be equal on ranks."""

from __future__ import annotations

from typing import Final

from hasten.extension import SEVERAL_RANKS, Extension

extension: Final = Extension(
    name="divergence",
    summary="comparison of weights and state that must be equal on ranks",
    run_parts={"divergence": "hasten.extensions.divergence.part:DivergencePart"},
    run_part_settings={"divergence": SEVERAL_RANKS},
)
