"""Transforms that compile a model: the whole model, or its repeated blocks, with or without the loss and the norms beside them."""

from __future__ import annotations

import importlib.util
import logging
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from types import FunctionType
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hasten.config.sections.loop import TorchDynamoPlugin
from hasten.errors import ConfigError
from hasten.modules import forwarding
from hasten.precision.base import Precision
from hasten.progress.waiting import waiting_line
from hasten.runtime.context import ProcessContext
from hasten.strategies.base import PrepareRequest, Stage, is_trainable
from hasten.strategies.blocks import repeated_blocks

log = logging.getLogger(__name__)

_ROUNDS: Final = 3
"""Number of calls of each module after which a compilation without a graph is an error."""
LOSSES: Final = frozenset({"ForCausalLMLoss", "ForMaskedLMLoss"})
"""Loss functions of transformers that are a cross entropy over a vocabulary, and compile as one graph."""


class CompileWhole:
    """Transform that compiles the prepared model in place; its class, names and state dict stay the same."""

    stage = Stage.COMPILE_WHOLE

    def __init__(self, dynamo: TorchDynamoPlugin) -> None:
        self._options = compile_keywords(dynamo)

    def apply(
        self,
        model: nn.Module,
        request: PrepareRequest,
        ctx: ProcessContext,
        precision: Precision,
    ) -> nn.Module:
        if not is_compiled(model):
            compile_modules([model], type(model).__name__, self._options, ctx.is_main)
        return model

    def undo(self, model: nn.Module) -> nn.Module:
        return remove_compiled(model)


class CompileBlocks:
    """Transform that compiles each repeated block in place; equal blocks share one compilation.

    With `automatic`, which `performance="auto"` sets, models that cannot be compiled run eagerly and the reason is logged.
    """

    stage = Stage.COMPILE_BLOCKS

    def __init__(self, dynamo: TorchDynamoPlugin, automatic: bool = False) -> None:
        self._options = compile_keywords(dynamo)
        self._with_rest = dynamo.compile_loss
        self._automatic = automatic

    def apply(
        self,
        model: nn.Module,
        request: PrepareRequest,
        ctx: ProcessContext,
        precision: Precision,
    ) -> nn.Module:
        model_name = type(model).__name__
        blocks = [block for _, block in repeated_blocks(model)]
        if self._automatic:
            if not request.train or not is_trainable(model):
                return model
            if reason := _reason_against_compiling(blocks, ctx.device):
                log.info("performance: %s is not compiled: %s", model_name, reason)
                return model
        if self._with_rest and blocks and request.train:
            compile_rest(model, self._options)
        if not blocks:
            log.info(
                "%s has no repeated block to compile by region; compiling it whole",
                model_name,
            )
            blocks = [model]
        blocks = [block for block in blocks if not is_compiled(block)]
        compile_modules(blocks, model_name, self._options, ctx.is_main, self._automatic)
        return model

    def undo(self, model: nn.Module) -> nn.Module:
        return remove_all_compiled(model)


def _reason_against_compiling(blocks: Sequence[nn.Module], device: torch.device) -> str:
    """Return the reason why blocks are not compiled automatically; empty if they are."""
    if not blocks:
        return "it has no repeated block"
    if device.type == "cuda":
        if importlib.util.find_spec("triton"):
            return ""
        return "Triton, which generates its kernels, is not installed"
    if device.type == "cpu":
        if shutil.which("g++"):
            return ""
        return "there is no g++ on this machine"
    return f"automatic compilation has not been tested on {device.type}"


class FirstCalls:
    """First calls of compiled modules, in which torch compiles them: a line in the terminal meanwhile, and one in the log at the end.

    Graphs are counted: if the compiler skipped all modules, a setting that was given has no effect, which is an error.
    """

    def __init__(
        self, modules: Sequence[nn.Module], name: str, is_main: bool, automatic: bool
    ) -> None:
        self._modules = modules
        if len(modules) == 1:
            self._title = name
        else:
            self._title = f"the {len(modules)} blocks of {name}"
        self._name = name
        self._is_main = is_main
        self._automatic = automatic
        self._num_rounds = 0
        self._num_called = 0
        self._num_graphs = 0
        self._spent_s = 0.0
        self._intercept_calls()

    def _intercept_calls(self) -> None:
        self._num_called = 0
        self._num_rounds += 1
        for module in self._modules:
            module._compiled_call_impl = _FirstCall(self, module)

    # Any: the module's
    def run(
        self, call: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any
    ) -> Any:
        """Call a module for the first time, and return its result."""
        self._num_called += 1
        started_s = time.monotonic()
        num_graphs = count_graphs()
        try:
            with waiting_line(self._waiting_text) if self._is_main else nullcontext():
                output = call(*args, **kwargs)
        except torch._dynamo.exc.TorchDynamoException as error:
            if not self._automatic:
                raise
            self._run_eagerly(
                f"torch's compiler failed ({type(error).__name__}: {error})"
            )
            return module(*args, **kwargs)
        self._spent_s += time.monotonic() - started_s
        self._num_graphs += count_graphs() - num_graphs
        if self._num_called == len(self._modules):
            self._report_seconds()
        return output

    def _report_seconds(self) -> None:
        """Log what was compiled. Raises: ConfigError if nothing was."""
        if not self._num_graphs and not any(map(_has_compiled_code, self._modules)):
            self._explain_nothing()
        elif self._is_main:
            if self._num_graphs == 1:
                graphs = "1 graph"
            else:
                graphs = f"{self._num_graphs} graphs"
            log.info("compiled %s in %.1f s (%s)", self._title, self._spent_s, graphs)

    def _explain_nothing(self) -> None:
        # compilation may be suspended, such as while operations are counted
        if self._num_rounds < _ROUNDS:
            self._intercept_calls()
            return
        reason = f"torch's compiler skipped its code in {_ROUNDS} calls"
        if not self._automatic:
            raise ConfigError(
                f"nothing of {self._name} was compiled, because {reason}; the setting would have no effect. Remove torch.compiler.disable "
                "from its forward, or remove dynamo_backend and dynamo_plugin."
            )
        self._run_eagerly(reason)

    def _run_eagerly(self, reason: str) -> None:
        for module in self._modules:
            remove_compiled(module)
        log.warning("performance: %s is not compiled: %s", self._name, reason)

    def _waiting_text(self, seconds: float) -> str:
        if len(self._modules) == 1:
            block = ""
        else:
            block = f", block {self._num_called} of {len(self._modules)}"
        return f"compiling {self._name}{block}, {self._spent_s + seconds:.0f} s"


class _FirstCall:
    """Replacement of a module's compiled function until it is called."""

    def __init__(self, calls: FirstCalls, module: nn.Module) -> None:
        compiled = module._compiled_call_impl
        assert compiled is not None, "the module was compiled"
        self._calls = calls
        self._module = module
        self._compiled = compiled

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # Any: the module's
        self._module._compiled_call_impl = self._compiled
        return self._calls.run(self._compiled, self._module, args, kwargs)


def count_graphs() -> int:
    """Return the number of graphs that torch has compiled in this process."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def _has_compiled_code(module: nn.Module) -> bool:
    """Return whether the compiler holds code of the module's forward, perhaps from another model of the same class."""
    forward = module.forward
    code = getattr(forward, "__code__", None) or type(forward).__call__.__code__
    return bool(torch._dynamo.eval_frame._debug_get_cache_entry_list(code))


class CompiledForward(forwarding.Forward):
    """Forward of a class of torch, called from a frame that the compiler does not skip.

    The compiler skips frames of torch's own files, so `module.compile()` alone has no effect on classes such as
    `nn.TransformerEncoderLayer`. Hooks of the module run outside the compiled code, as they do for other classes.
    """

    tag = "compiled"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # Any: the module's
        return self.inner(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        """Replace the subclass by this class when the module is copied or pickled."""
        return CompiledForward, (), self.__getstate__()


def _compiled_forward_class(name: str) -> type[CompiledForward]:
    """Return a subclass with separate code, since the compiler limits and shares what it knows by code object."""
    call = FunctionType(
        CompiledForward.__call__.__code__.replace(co_name=name), globals()
    )
    return type("CompiledForward", (CompiledForward,), {"__call__": call})


def compile_modules(
    modules: Sequence[nn.Module],
    name: str,
    compile_options: dict[str, Any],  # Any: torch.compile's keywords
    is_main: bool,
    automatic: bool = False,
) -> None:
    """Compile modules of the model `name` in place; the wait for their first calls is shown on the main process."""
    num_parameters = 0
    for module in modules:
        for parameter in module.parameters():
            num_parameters += parameter.numel()
    forward_class = _compiled_forward_class(f"{name}_{num_parameters}")
    for module in modules:
        inner = inside_ddp(module)
        if _is_torchs(inner):
            forwarding.replace(inner, forward_class())
        module.compile(**compile_options)
    if modules and not compile_options.get("disable"):
        FirstCalls(modules, name, is_main, automatic)


def inside_ddp(module: nn.Module) -> nn.Module:
    """Return the module in DDP's wrapper, or the module itself."""
    if isinstance(module, DistributedDataParallel):
        inner = module.module
    else:
        inner = module
    assert isinstance(inner, nn.Module), "DDP wraps a module"
    return inner


class CompiledLoss:
    """Compiled loss function of a transformers model, which never holds float32 copies of the logits.

    Calls without gradients, and logits that are not plain tensors, go to the function itself, as do copies and pickles.
    """

    # Any: torch.compile's keywords
    def __init__(
        self, inner: Callable[..., Tensor], compile_options: dict[str, Any]
    ) -> None:
        self.inner = inner
        self._compiled: Callable[..., Tensor] = torch.compile(inner, **compile_options)

    # Any: arguments of transformers' loss functions
    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        logits = kwargs.get("logits", args[0] if args else None)
        is_plain = (
            type(logits) is Tensor and logits.requires_grad and torch.is_grad_enabled()
        )
        return (self._compiled if is_plain else self.inner)(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        """Replace this object by the function when the model is copied or pickled."""
        return _return_function, (self.inner,)


def _return_function(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return function


# Any: torch.compile's keywords
def compile_rest(model: nn.Module, compile_options: dict[str, Any]) -> list[str]:
    """Compile the norms outside the repeated blocks, and transformers' loss function; return what was compiled."""
    compiled_names = []
    for module_name, module in _norms_outside_blocks(model):
        if not is_compiled(module):
            module.compile(**compile_options)
            compiled_names.append(module_name)
    for module in _models_with_head(model):
        if getattr(module.loss_function, "__name__", "") in LOSSES:
            module.loss_function = CompiledLoss(module.loss_function, compile_options)
            compiled_names.append(f"the loss of {type(module).__name__}")
    return compiled_names


def _norms_outside_blocks(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the layers outside the repeated blocks that have only vectors as parameters, but for torch's, which are one kernel already."""
    in_blocks = set()
    for _, block in repeated_blocks(model):
        for module in block.modules():
            in_blocks.add(id(module))
    for module_name, module in model.named_modules():
        parameters = list(module.parameters(recurse=False))
        if (
            id(module) in in_blocks
            or not parameters
            or any(module.children())
            or _is_torchs(module)
        ):
            continue
        if all(parameter.ndim == 1 for parameter in parameters):
            yield module_name, module


def _is_torchs(module: nn.Module) -> bool:
    """Return whether the module's forward is in a file of torch, whose frames the compiler skips."""
    return str(module.forward.__module__).partition(".")[0] == "torch"


def _models_with_head(model: nn.Module) -> Iterator[Any]:  # Any: models of transformers
    """Yield the models of transformers that compute logits and may compute their loss."""
    for module in model.modules():
        get_head = getattr(module, "get_output_embeddings", None)
        if (
            isinstance(getattr(type(module), "loss_function", None), property)
            and callable(get_head)
            and get_head() is not None
        ):
            yield module


def remove_all_compiled(model: nn.Module) -> nn.Module:
    """Remove the compiled functions of the model's modules and losses, and return the model."""
    for module in model.modules():
        remove_compiled(module)
    for module in _models_with_head(model):
        if isinstance(module.loss_function, CompiledLoss):
            module.loss_function = module.loss_function.inner
    return model


# Any: torch.compile's keywords
def compile_keywords(dynamo: TorchDynamoPlugin) -> dict[str, Any]:
    """Return the keywords of torch.compile for the settings."""
    compile_options: dict[str, Any] = {
        "backend": dynamo.backend,
        "fullgraph": dynamo.fullgraph,
        "dynamic": dynamo.dynamic,
        "disable": dynamo.disable,
    }
    if dynamo.options is not None:
        return {**compile_options, "options": dict(dynamo.options)}
    if dynamo.mode == "default":
        return compile_options
    return {**compile_options, "mode": dynamo.mode}


def is_compiled(model: nn.Module) -> bool:
    """Return whether calls of this module go through a compiled function."""
    return getattr(model, "_compiled_call_impl", None) is not None


def remove_compiled(model: nn.Module) -> nn.Module:
    """Remove the module's compiled function, so that calls run eagerly, and return the module."""
    if is_compiled(model):
        model._compiled_call_impl = None
        forwarding.restore(inside_ddp(model), CompiledForward.tag)
    return model
