"""Compilation of repeated blocks in the background, while training runs eagerly.

The first two training steps run eagerly and record a block's inputs. If both have the same shapes and dtypes, a separate process compiles
a copy of the block without its weights, which fills the compiler's caches on disk; when that process has finished, the blocks are
compiled in place and load their code from the caches. Sharded blocks and fp8 blocks, which cannot be copied, are compiled in the training
process instead, after the same two steps. Until then, and if anything fails, the model runs eagerly; on a GPU, blocks that will be compiled
recompute their activations meanwhile (sharded ones do not), because an eager step needs more memory than a compiled one and would set the
peak of the whole run.
"""

from __future__ import annotations

import copy
import importlib.util
import shutil
import subprocess
import sys
import tempfile
import threading
import weakref
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import cloudpickle
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hasten import trees
from hasten.config.sections.loop import TorchDynamoPlugin
from hasten.modules import forwarding
from hasten.precision.base import Precision
from hasten.runtime.context import ProcessContext
from hasten.runtime.logs import get_logger
from hasten.strategies.base import PrepareRequest, Stage, is_trainable
from hasten.strategies.blocks import repeated_blocks
from hasten.strategies.compiling import (
    SETTLING,
    all_uncompiled,
    compile_modules,
    compile_rest,
    is_compiled,
    is_settling,
    options,
)
from hasten.strategies.recompute import RecomputedForward

log = get_logger(__name__)

BACKEND: Final = "inductor"
_OFF = "performance={'compile': False} turns it off"


class CompileAhead:
    """Transform that compiles each repeated block in place once the compiler's caches hold its code."""

    stage = Stage.COMPILE_BLOCKS

    def __init__(self, in_background: bool = True, recompute: bool = True) -> None:
        """Create the transform.

        `in_background=False` compiles in the training process, for blocks that cannot be copied; `recompute=False` leaves the
        activations of blocks that wait for it in memory.
        """
        self._in_background = in_background
        self._recompute = recompute

    def apply(self, model: nn.Module, request: PrepareRequest, ctx: ProcessContext, precision: Precision) -> nn.Module:
        name = type(model).__name__
        blocks = [block for _, block in repeated_blocks(model) if not is_compiled(block)]
        if not request.train or not is_trainable(model) or is_settling(model):
            return model
        if not blocks:
            log.info("performance: %s is not compiled: it has no repeated block", name)
        elif why := _no_compiler(ctx.device):
            log.info("performance: %s is not compiled: %s", name, why)
        else:
            _Look(model, blocks, self._in_background, ctx.is_main)
            if ctx.device.type == "cuda" and self._recompute:
                recompute_until_compiled(blocks)
        return model

    def undo(self, model: nn.Module) -> nn.Module:
        for part in model.modules():
            look = vars(part).get(SETTLING)
            if isinstance(look, _Look):
                look.close()
        return all_uncompiled(model)


class UntilCompiled(RecomputedForward):
    """Forward of a block that is not compiled yet: its activations are recomputed in backward."""

    tag = "recompute until compiled"


def recompute_until_compiled(blocks: list[nn.Module]) -> None:
    """Recompute the activations of the blocks as long as they wait for their compilation, if all of them can."""
    if all(_can_recompute(block) for block in blocks):
        for block in blocks:
            forwarding.replace(block, UntilCompiled())


def _can_recompute(block: nn.Module) -> bool:
    """Return whether a second forward of the block has no effect: nothing is counted in buffers, and no checkpoint is in it yet."""
    own = forwarding.find(block, RecomputedForward.tag) is not None or getattr(block, "gradient_checkpointing", False)
    return not own and next(block.buffers(), None) is None


def _no_compiler(device: torch.device) -> str:
    match device.type:
        case "cuda":
            return "" if importlib.util.find_spec("triton") else "Triton, which generates its kernels, is not installed"
        case "cpu":
            return "" if shutil.which("g++") else "there is no g++ on this machine"
    return f"compiling in advance has not been tested on {device.type}"


def load_compiler() -> None:
    """Import torch's compiler; runs in a thread beside the training."""
    try:
        import_module("torch._inductor.compile_fx")  # takes seconds, so only a training that compiles imports it
    except Exception:  # at the end of the process the import may fail half-way; a later compilation imports it again
        log.debug("torch's compiler was not loaded in advance", exc_info=True)


class _Look:
    """Forward pre-hook that records the inputs of one block and waits for the process that compiles it."""

    waits = True

    def __init__(self, model: nn.Module, blocks: list[nn.Module], in_background: bool, is_main: bool) -> None:
        self._model = model
        self._is_main = is_main
        self._blocks = blocks
        self._name = type(model).__name__
        self._in_background = in_background
        self._first: object = None
        self._process: subprocess.Popen[str] | None = None
        self._loading = threading.Thread(target=load_compiler, name="hasten-load-compiler", daemon=True)
        self._handle: RemovableHandle = blocks[0].register_forward_pre_hook(self, with_kwargs=True)
        vars(blocks[0])[SETTLING] = self

    def __call__(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:  # Any: the user's
        if not block.training or not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return
        if self._process is not None:
            self._finish(self._process)
            return
        shown = [
            (leaf.shape, leaf.dtype, leaf.stride(), leaf.requires_grad) if isinstance(leaf, Tensor) else type(leaf)
            for leaf in trees.leaves((args, kwargs))
        ]
        if self._first is None:
            self._first = shown
        elif self._first != shown:
            self._give_up("the shapes of its inputs change between steps, so each step would be recompiled")
        elif not self._in_background:
            self.close()
            self._compile("the first compiled step takes longer")
        else:
            try:
                self._process = _start(_without_weights(block), block, args, kwargs)
                self._loading.start()  # the import takes seconds, which the first compiled step then saves
                log.info("performance: a block of %s is being compiled in a separate process; %s", self._name, _OFF)
            except (TypeError, AttributeError, ValueError, RuntimeError, NotImplementedError, OSError) as error:
                self._give_up(f"its block cannot be copied to another process ({error})")

    def _finish(self, process: subprocess.Popen[str]) -> None:
        code = process.poll()
        if code is None or self._loading.is_alive():
            return
        said = process.stderr.read().strip().splitlines() if process.stderr is not None else []
        self.close()
        if code:
            why = said[-1] if said else f"exit code {code}"
            log.info("performance: %s is not compiled: compiling its block in advance failed (%s)", self._name, why)
            return
        self._compile("the code was generated in the background")

    def _compile(self, how: str) -> None:
        """Compile the blocks in place, the embeddings, norms and transformers' loss beside them."""
        chosen = options(TorchDynamoPlugin(backend=BACKEND))
        rest = compile_rest(self._model, chosen)
        compile_modules(self._blocks, self._name, chosen, self._is_main)
        log.info(
            "performance: the %d blocks of %s%s are compiled from now on: %s, and results are equal except for rounding; %s",
            len(self._blocks),
            self._name,
            "".join(f", {name}" for name in rest),
            how,
            _OFF,
        )

    def _give_up(self, why: str) -> None:
        self.close()
        log.info("performance: %s is not compiled: %s", self._name, why)

    def close(self) -> None:
        """Remove the hook and end the process."""
        self._handle.remove()
        vars(self._blocks[0])[SETTLING] = None
        for block in self._blocks:
            forwarding.restore(block, UntilCompiled.tag)
        if self._process is not None:
            if self._process.poll() is None:
                self._process.kill()
            self._process.wait()
            if self._process.stderr is not None:
                self._process.stderr.close()

    def __deepcopy__(self, memo: dict[int, Any]) -> _NoLook:
        """Return a hook that does nothing: copies of the model are not watched."""
        return _NoLook()

    def __reduce__(self) -> tuple[Any, ...]:
        """Replace this hook by one that does nothing when the model is pickled."""
        return _NoLook, ()


class _NoLook:
    """Hook that does nothing, in copies of a block."""

    def __call__(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:  # Any: the user's
        return None


def _without_weights(block: nn.Module) -> nn.Module:
    """Return a copy of the block with its parameters on the meta device."""
    bare = copy.deepcopy(block, {id(p): nn.Parameter(_empty(p), p.requires_grad) for p in block.parameters()})
    forwarding.restore(bare, UntilCompiled.tag)
    return bare


def _start(bare: nn.Module, block: nn.Module, args: Any, kwargs: Any) -> subprocess.Popen[str]:  # Any: the user's
    """Start a process that compiles the copy of a block."""
    device = next((tensor.device for tensor in (*block.parameters(), *block.buffers())), torch.device("cpu"))
    content = {
        "block": bare,
        "inputs": trees.map_tensors(lambda t: _empty(t).requires_grad_(t.requires_grad), (args, kwargs)),
        "device": str(device),
        "autocast": torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None,
        "tf32": torch.get_float32_matmul_precision(),
        "threads": torch.get_num_threads(),
        "options": options(TorchDynamoPlugin(backend=BACKEND)),
    }
    folder = Path(tempfile.mkdtemp(prefix="hasten_compile_"))
    target = folder / "block.pkl"
    try:
        target.write_bytes(cloudpickle.dumps(content))
        Path(f"{target}.paths").write_text("\0".join(sys.path), encoding="utf-8")
        process = subprocess.Popen(
            [sys.executable, "-m", "hasten.strategies.compile_worker", str(target)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    weakref.finalize(process, shutil.rmtree, folder, ignore_errors=True)
    weakref.finalize(block, process.kill)  # if training ends first
    return process


def _empty(tensor: Tensor) -> Tensor:
    """Return a tensor with the same strides and dtype on the meta device."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
