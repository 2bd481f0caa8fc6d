"""Kernels of the package liger-kernel in models of transformers."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from hasten.errors import ConfigError
from hasten.optional import need

log = logging.getLogger(__name__)


def apply_liger(model: nn.Module, options: Mapping[str, Any], device: torch.device) -> None:
    """Replace parts of a transformers model by the kernels of liger-kernel, in place; `options` go to its function.

    Raises: MissingPackageError without the package; ConfigError for a model that it does not know, or a device without Triton.
    """
    patches = need("liger_kernel.transformers.monkey_patch", why="TrainingArguments(use_liger_kernel=True)")
    if device.type not in ("cuda", "xpu"):
        raise ConfigError(
            f"use_liger_kernel=True replaces layers by Triton kernels, which a {device.type} device cannot run; remove it, or "
            "train on a GPU. `hasten.modules.use_chunked_loss(model)` saves the memory of the logits on any device."
        )
    get_base = getattr(model, "get_base_model", None)  # of a PEFT model
    base: Any = model if get_base is None else get_base()
    kind = getattr(getattr(base, "config", None), "model_type", None)
    if kind not in patches.MODEL_TYPE_TO_APPLY_LIGER_FN:
        raise ConfigError(
            f"use_liger_kernel=True has no kernels for {type(base).__name__} (model_type={kind!r}), so nothing would be replaced; "
            "remove it, or use `hasten.modules.use_chunked_loss(model)` for the memory of its logits."
        )
    patches._apply_liger_kernel_to_instance(model=base, **options)
    log.info("liger kernels replace parts of %s (%s)", type(base).__name__, kind)
