"""What the extension offers: `hasten.optimizers`."""

from __future__ import annotations

from typing import Final

from hasten.extension import Extension

extension: Final = Extension(
    name="muon",
    summary="the optimizer Muon for hidden matrices, beside AdamW",
    public_names={"optimizers": "hasten.extensions.muon.optimizers:optimizers"},
)
