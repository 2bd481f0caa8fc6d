"""Transforms that compile a model: the whole model, or each of its repeated blocks."""

from __future__ import annotations

import logging
from typing import Any, Final

from torch import nn

from hasten.config.sections.loop import TorchDynamoPlugin
from hasten.precision.base import Precision
from hasten.runtime.context import ProcessContext
from hasten.strategies.base import PrepareRequest, Stage
from hasten.strategies.blocks import repeated_blocks

log = logging.getLogger(__name__)

SETTLING: Final = "_hasten_settling"
"""Attribute of a block that holds the hook waiting for its compilation."""


class CompileWhole:
    """Transform that compiles the prepared model in place; its class, names and state dict stay the same."""

    stage = Stage.COMPILE_WHOLE

    def __init__(self, config: TorchDynamoPlugin) -> None:
        self._options = options(config)

    def apply(self, model: nn.Module, request: PrepareRequest, ctx: ProcessContext, precision: Precision) -> nn.Module:
        if not is_compiled(model):
            model.compile(**self._options)
        return model

    def undo(self, model: nn.Module) -> nn.Module:
        return uncompiled(model)


class CompileBlocks:
    """Transform that compiles each repeated block in place; equal blocks share one compilation."""

    stage = Stage.COMPILE_BLOCKS

    def __init__(self, config: TorchDynamoPlugin) -> None:
        self._options = options(config)

    def apply(self, model: nn.Module, request: PrepareRequest, ctx: ProcessContext, precision: Precision) -> nn.Module:
        blocks = [block for _, block in repeated_blocks(model)]
        if not blocks:
            log.info("%s has no repeated block to compile by region; compiling it whole", type(model).__name__)
            blocks = [model]
        for block in blocks:
            if not is_compiled(block):
                block.compile(**self._options)
        return model

    def undo(self, model: nn.Module) -> nn.Module:
        for part in model.modules():
            uncompiled(part)
        return model


def options(config: TorchDynamoPlugin) -> dict[str, Any]:  # Any: torch.compile's keywords
    """Return the keywords of torch.compile for the settings."""
    chosen: dict[str, Any] = {
        "backend": config.backend,
        "fullgraph": config.fullgraph,
        "dynamic": config.dynamic,
        "disable": config.disable,
    }
    if config.options is not None:
        return {**chosen, "options": dict(config.options)}
    return chosen if config.mode == "default" else {**chosen, "mode": config.mode}


def is_compiled(model: nn.Module) -> bool:
    """Return whether calls of this module go through a compiled function."""
    return getattr(model, "_compiled_call_impl", None) is not None


def is_settling(model: nn.Module) -> bool:
    """Return whether blocks of the model may still be compiled in the background (`strategies.compile_ahead`)."""
    return any(getattr(vars(part).get(SETTLING), "waits", False) for part in model.modules())


def uncompiled(model: nn.Module) -> nn.Module:
    """Remove the module's compiled function, so that calls run eagerly, and return the module."""
    if is_compiled(model):
        model._compiled_call_impl = None
    return model
