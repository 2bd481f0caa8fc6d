"""What the extension offers: `hasten.LocalSGD`."""

from __future__ import annotations

from typing import Final

from hasten.extension import Extension

extension: Final = Extension(
    name="local_sgd",
    summary="ranks that train independently and average their parameters every few updates",
    public_names={"LocalSGD": "hasten.extensions.local_sgd.local_sgd:LocalSGD"},
)
