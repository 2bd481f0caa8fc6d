"""Transforms that compile a model: the whole model, or its repeated blocks, with or without the loss and the layers beside them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any, Final

import torch
from torch import Tensor, nn

from hasten.config.sections.loop import TorchDynamoPlugin
from hasten.precision.base import Precision
from hasten.progress.waiting import waiting_line
from hasten.runtime.context import ProcessContext
from hasten.strategies.base import PrepareRequest, Stage
from hasten.strategies.blocks import repeated_blocks

log = logging.getLogger(__name__)

SETTLING: Final = "_hasten_settling"
"""Attribute of a block that holds the hook waiting for its compilation."""
LOSSES: Final = frozenset({"ForCausalLMLoss", "ForMaskedLMLoss"})
"""Loss functions of transformers that are a cross entropy over a vocabulary, and compile as one graph."""


class CompileWhole:
    """Transform that compiles the prepared model in place; its class, names and state dict stay the same."""

    stage = Stage.COMPILE_WHOLE

    def __init__(self, config: TorchDynamoPlugin) -> None:
        self._options = options(config)

    def apply(self, model: nn.Module, request: PrepareRequest, ctx: ProcessContext, precision: Precision) -> nn.Module:
        if not is_compiled(model):
            compile_modules([model], type(model).__name__, self._options, ctx.is_main)
        return model

    def undo(self, model: nn.Module) -> nn.Module:
        return uncompiled(model)


class CompileBlocks:
    """Transform that compiles each repeated block in place; equal blocks share one compilation."""

    stage = Stage.COMPILE_BLOCKS

    def __init__(self, config: TorchDynamoPlugin) -> None:
        self._options = options(config)
        self._with_rest = config.compile_loss

    def apply(self, model: nn.Module, request: PrepareRequest, ctx: ProcessContext, precision: Precision) -> nn.Module:
        blocks = [block for _, block in repeated_blocks(model)]
        if self._with_rest and blocks and request.train:
            compile_rest(model, self._options)
        if not blocks:
            log.info("%s has no repeated block to compile by region; compiling it whole", type(model).__name__)
            blocks = [model]
        compile_modules(
            [block for block in blocks if not is_compiled(block)], type(model).__name__, self._options, ctx.is_main
        )
        return model

    def undo(self, model: nn.Module) -> nn.Module:
        return all_uncompiled(model)


class FirstCalls:
    """First calls of compiled modules, in which torch compiles them: a line in the terminal meanwhile, and one in the log at the end."""

    def __init__(self, modules: Sequence[nn.Module], name: str, is_main: bool) -> None:
        self._name = name
        self._number = len(modules)
        self._is_main = is_main
        self._called = 0
        self._spent_s = 0.0
        for module in modules:
            module._compiled_call_impl = _FirstCall(self, module)

    def run(self, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:  # Any: the module's
        """Call a module for the first time, and return its result."""
        self._called += 1
        begun = time.monotonic()
        with waiting_line(self._text) if self._is_main else nullcontext():
            result = call(*args, **kwargs)
        self._spent_s += time.monotonic() - begun
        if self._called == self._number and self._is_main:
            what = self._name if self._number == 1 else f"the {self._number} blocks of {self._name}"
            log.info("compiled %s in %.1f s", what, self._spent_s)
        return result

    def _text(self, seconds: float) -> str:
        block = "" if self._number == 1 else f", block {self._called} of {self._number}"
        return f"compiling {self._name}{block}, {self._spent_s + seconds:.0f} s"


class _FirstCall:
    """Replacement of a module's compiled function until it is called."""

    def __init__(self, calls: FirstCalls, module: nn.Module) -> None:
        compiled = module._compiled_call_impl
        assert compiled is not None, "the module was compiled"
        self._calls, self._module, self._compiled = calls, module, compiled

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # Any: the module's
        self._module._compiled_call_impl = self._compiled
        return self._calls.run(self._compiled, args, kwargs)


def compile_modules(modules: Sequence[nn.Module], name: str, chosen: dict[str, Any], is_main: bool) -> None:
    """Compile modules of the model `name` in place; the wait for their first calls is shown on the main process."""
    for module in modules:
        module.compile(**chosen)
    if modules:
        FirstCalls(modules, name, is_main)


class CompiledLoss:
    """Compiled loss function of a transformers model, which never holds float32 copies of the logits.

    Calls without gradients, and logits that are not plain tensors, go to the function itself, as do copies and pickles.
    """

    def __init__(self, inner: Callable[..., Tensor], chosen: dict[str, Any]) -> None:  # Any: torch.compile's keywords
        self.inner = inner
        self._compiled: Callable[..., Tensor] = torch.compile(inner, **chosen)

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:  # Any: arguments of transformers' loss functions
        logits = kwargs.get("logits", args[0] if args else None)
        plain = type(logits) is Tensor and logits.requires_grad and torch.is_grad_enabled()
        return (self._compiled if plain else self.inner)(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        """Replace this object by the function when the model is copied or pickled."""
        return _the_same, (self.inner,)


def _the_same(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return function


def compile_rest(model: nn.Module, chosen: dict[str, Any]) -> list[str]:  # Any: torch.compile's keywords
    """Compile the embeddings and norms outside the repeated blocks, and transformers' loss function; return what was compiled."""
    done = []
    for name, part in _beside_blocks(model):
        if not is_compiled(part):
            part.compile(**chosen)
            done.append(name)
    for part in _with_head(model):
        if getattr(part.loss_function, "__name__", "") in LOSSES:
            part.loss_function = CompiledLoss(part.loss_function, chosen)
            done.append(f"the loss of {type(part).__name__}")
    return done


def _beside_blocks(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the embeddings, and the layers that have only vectors as parameters, outside the repeated blocks."""
    inside = {id(part) for _, block in repeated_blocks(model) for part in block.modules()}
    for name, part in model.named_modules():
        own = list(part.parameters(recurse=False))
        if id(part) in inside or not own or any(part.children()):
            continue
        looks_up = type(part) is nn.Embedding and not part.sparse and part.max_norm is None
        if looks_up or all(parameter.ndim == 1 for parameter in own):
            yield name, part


def _with_head(model: nn.Module) -> Iterator[Any]:  # Any: models of transformers
    """Yield the models of transformers that compute logits and may compute their loss."""
    for part in model.modules():
        head = getattr(part, "get_output_embeddings", None)
        if isinstance(getattr(type(part), "loss_function", None), property) and callable(head) and head() is not None:
            yield part


def all_uncompiled(model: nn.Module) -> nn.Module:
    """Remove the compiled functions of the model's modules and losses, and return the model."""
    for part in model.modules():
        uncompiled(part)
    for part in _with_head(model):
        if isinstance(part.loss_function, CompiledLoss):
            part.loss_function = part.loss_function.inner
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
