"""What the extension offers: a strategy, which TPUs select."""

from __future__ import annotations

from typing import Final

from hasten.extension import Extension

extension: Final = Extension(
    name="xla",
    summary="torch_xla: TPUs",
    strategies={"xla": "hasten.extensions.xla.strategy:STRATEGY"},
    strategy_variables={"xla": "PJRT_DEVICE=TPU"},
)
