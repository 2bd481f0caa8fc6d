"""Weights kept in a small dtype and computed with in a larger one, layer by layer."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Final

import torch
from torch import nn

from hasten.modules.hooks import LayerwiseCastingHook, add_hook_to_module

CASTABLE: Final = (
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
    nn.Linear,
)
"""Layers that do little else than multiply with their weights; norms need their precision."""


def attach_layerwise_casting_hooks(
    module: nn.Module,
    storage_dtype: torch.dtype,
    compute_dtype: torch.dtype,
    skip_modules_pattern: str | Collection[str] | None = None,
    skip_modules_classes: tuple[type[nn.Module], ...] | None = None,
    non_blocking: bool = False,
) -> None:
    """Keep the weights of linear and convolution layers in `storage_dtype`, and compute in `compute_dtype`.

    Modules whose name matches a pattern, or that are of one of the classes, keep their dtype with all that is in them.
    """
    patterns = [skip_modules_pattern] if isinstance(skip_modules_pattern, str) else list(skip_modules_pattern or ())

    def visit(part: nn.Module, name: str) -> None:
        skipped = isinstance(part, skip_modules_classes or ()) or any(re.search(one, name) for one in patterns)
        if skipped:
            return
        if isinstance(part, CASTABLE):
            add_hook_to_module(part, LayerwiseCastingHook(storage_dtype, compute_dtype, non_blocking), append=True)
            return
        for child_name, child in part.named_children():
            visit(child, f"{name}.{child_name}" if name else child_name)

    visit(module, "")
