"""Execution of one stage of a model: the user's forward, entered at the stage's first block and left after its last.

Every stage runs the whole forward, because the computations around the blocks (masks, positions, arguments of each block)
are the model's. Modules of other stages are replaced by stand-ins: those before the first block return placeholders of
the right shape, blocks in between return their input. At the stage's first block the hidden state of the previous stage
replaces the placeholder; after the stage's last block the forward is left by an exception.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from hasten import trees
from hasten.errors import PrepareError, StepError
from hasten.extensions.pipeline.cut import StageCut
from hasten.modules import forwarding
from hasten.modules.names import TAG, StagePart
from hasten.modules.surgery import swap
from hasten.strategies.tensor.ops import RankRandomStream


class _BlocksDone(BaseException):
    """Exception that ends a forward after the stage's last block; a BaseException, so that user code does not catch it."""

    def __init__(self, hidden_state: Tensor) -> None:
        self.hidden = hidden_state


class StageDone(BaseException):
    """Exception that ends the code around a model's call, with the output of the stage."""

    def __init__(self, hidden_state: Tensor) -> None:
        self.hidden = hidden_state


@dataclass(slots=True)
class SeenCall:
    """Shapes that the first stage recorded for a kind of batch, for the stand-ins of the other stages."""

    # Any: nested containers of shapes
    units: dict[str, list[Any]] = field(default_factory=dict)
    """Outputs of each module before the blocks, call by call, with shapes in place of tensors."""
    returns: int = 0
    """Number of values in the tuple that a block returns; 0 for a single tensor."""


@dataclass(slots=True)
class Pass:
    """One run of one stage."""

    stage: int
    start: int
    stop: int
    final: bool
    received: Tensor | None = None
    seen_call: SeenCall = field(default_factory=SeenCall)
    fill: float = math.nan
    """Value of placeholders: NaN, so that a placeholder that reaches an output is detected."""
    entered_stage: bool = False
    left_stage: bool = False
    calls: Counter[str] = field(default_factory=Counter)


class RemoteModule(nn.Module):
    """Stand-in for a module of another stage, with its plain attributes and meta tensors for its parameters."""

    def __init__(
        self, name: str, index: int | None, original: nn.Module, block_chain: BlockChain
    ) -> None:
        super().__init__()
        kept_attributes = {}
        for key, value in vars(original).items():
            if not key.startswith("_") and key != "training":
                kept_attributes[key] = value
        for key, parameter in original.named_parameters(recurse=False):
            kept_attributes[key] = torch.empty_like(parameter, device="meta")
        self.__dict__["kept"] = kept_attributes
        self.__dict__["line"] = block_chain
        self.name = name
        self.index = index

    def __getattr__(self, name: str) -> Any:  # Any: any attribute of the module
        kept_attributes = self.__dict__.get("kept", {})
        if name in kept_attributes:
            return kept_attributes[name]
        return super().__getattr__(name)

    # Any: the user's arguments and outputs
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return a placeholder, or the input if a block is skipped."""
        running_pass: Pass | None = self.__dict__["line"].running_pass
        if running_pass is None:
            raise StepError(
                f"{self.name!r} was called on a rank whose pipeline stage does not hold it, outside a call of the whole "
                "model. Call the model itself, under torch.no_grad(), or train with accelerator.forward_backward()."
            )
        if self.index is not None:
            return self._skip_block(running_pass, args, kwargs)
        return self._make_placeholder(running_pass)

    def _skip_block(
        self, running_pass: Pass, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        hidden_state = _hidden_state_of(args, kwargs, self.name)
        if running_pass.seen_call.returns:
            return (hidden_state, *[None] * (running_pass.seen_call.returns - 1))
        return hidden_state

    def _make_placeholder(self, running_pass: Pass) -> Any:
        if (running_pass.stage == 0 and not running_pass.entered_stage) or (
            running_pass.final and running_pass.left_stage
        ):
            if running_pass.stage == 0 and not running_pass.entered_stage:
                expected_side = "after"
                remedy_setting = "first_stage"
            else:
                expected_side = "before"
                remedy_setting = "last_stage"
            raise PrepareError(
                f"{self.name!r} was expected to run {expected_side} the blocks, based on the order in which the model registers its modules, but "
                f"it is called on the other side. Name it: pp_handler.{remedy_setting}=({self.name!r},)."
            )
        recorded_outputs = running_pass.seen_call.units.get(self.name, [])
        call_number = running_pass.calls[self.name]
        running_pass.calls[self.name] += 1
        if call_number >= len(recorded_outputs):
            raise PrepareError(
                f"{self.name!r} is called before the blocks on one pipeline stage and not on another, so its output is unknown here. A "
                "forward must call the same modules on every stage."
            )
        device = self.__dict__["line"].device
        return trees.map_leaves(
            lambda leaf: _fill_placeholder(leaf, running_pass.fill, device),
            recorded_outputs[call_number],
        )


class OutputShape(msgspec.Struct, frozen=True):
    """Shape of a tensor that another stage computed; not a dataclass, which `trees` would traverse."""

    shape: torch.Size
    dtype: torch.dtype


def _fill_placeholder(shape_leaf: Any, fill_value: float, device: torch.device) -> Any:
    if not isinstance(shape_leaf, OutputShape):
        return shape_leaf
    placeholder = torch.empty(shape_leaf.shape, dtype=shape_leaf.dtype, device=device)
    if shape_leaf.dtype.is_floating_point:
        return placeholder.fill_(fill_value)
    return placeholder.zero_()


def output_shapes(tree: Any) -> Any:  # Any: output of a module
    """Return the tree with shapes in place of tensors. Raises: PrepareError for containers that cannot be sent."""
    if isinstance(tree, Tensor):
        return OutputShape(tree.shape, tree.dtype)
    if tree is None or isinstance(tree, (bool, int, float, str)):
        return tree
    if type(tree) in (list, tuple):
        return type(tree)(map(output_shapes, tree))
    if type(tree) is dict:
        return {key: output_shapes(subtree) for key, subtree in tree.items()}
    raise PrepareError(
        f"a module before the blocks returned a {type(tree).__name__}, which cannot be represented by a placeholder on other pipeline "
        "stages. Return tensors, or tuples, lists and dicts of them."
    )


class StageForward(forwarding.Forward):
    """Forward of a partitioned model: runs the current stage, or the whole pipeline if the user calls the model."""

    tag = TAG

    def __init__(self, block_chain: BlockChain, call: Callable[..., Any]) -> None:
        self.line = block_chain
        self.call = call
        self.gathers_output = True
        """Whether a call returns its output on every rank, or only on the rank of the last stage."""

    @property
    def part(self) -> StagePart:
        """This rank's part of the model."""
        return self.line.part

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.line.running_pass is None:
            return self.call(self, args, kwargs)
        return self.through(args, kwargs)

    def through(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the stage of the current pass and return its output; for the last stage, the model's output."""
        running_pass = self.line.running_pass
        assert running_pass is not None, "a pass is running"
        try:
            output = self.inner(*args, **kwargs)
        except _BlocksDone as done:
            return done.hidden
        if not running_pass.entered_stage or not running_pass.left_stage:
            raise StepError(
                f"the forward of {type(self.module).__name__} ended without calling block {self.line.cut.blocks[running_pass.start]!r} "
                f"of {self.line.cut.container!r}, where pipeline stage {running_pass.stage} begins. A forward must call every block."
            )
        return output


class BlockChain:
    """One model on one rank of a pipeline: its stages, the stand-ins for the others, and the running pass."""

    def __init__(
        self,
        model: nn.Module,
        stage_cut: StageCut,
        stage_part: StagePart,
        rank: int,
        device: torch.device,
    ) -> None:
        self.cut = stage_cut
        self.part = stage_part
        self.device = device
        self.stages = stage_cut.place.stages_of(rank)
        self.running_pass: Pass | None = None
        self.recording = False
        self._container = model.get_submodule(stage_cut.container)
        self._blocks: dict[int, nn.Module] = {}
        self._stand_ins: dict[int, RemoteModule] = {}
        self._streams = {stage: RankRandomStream(model, stage) for stage in self.stages}
        self._take_out(model, rank)

    def _take_out(self, model: nn.Module, rank: int) -> None:
        """Replace the modules of other ranks by stand-ins."""
        name_prefix = f"{self.cut.container}." if self.cut.container else ""
        for index, name in enumerate(self.cut.blocks):
            block = self._container.get_submodule(name)
            self._stand_ins[index] = RemoteModule(
                name_prefix + name, index, block, self
            )
            if rank in self.cut.ranks_of(name_prefix + name):
                self._blocks[index] = block
            else:
                self._container.register_module(name, self._stand_ins[index])
        for name in (*self.cut.first, *self.cut.last):
            outer_module = model.get_submodule(name)
            if rank not in self.cut.ranks_of(name):
                swap(model, name, RemoteModule(name, None, outer_module, self))

    def attach_hooks(self, model: nn.Module) -> None:
        """Register the hooks that enter and leave stages; call after all other wrappers have registered their hooks."""
        for stage in self.stages:
            start, stop = self.cut.ranges[stage]
            self._blocks[start].register_forward_pre_hook(
                partial(_enter_stage, self, start), prepend=True, with_kwargs=True
            )
            self._blocks[stop - 1].register_forward_hook(
                partial(_leave_stage, self, stop - 1)
            )
        for name in self.cut.first:
            outer_module = model.get_submodule(name)
            if not isinstance(outer_module, RemoteModule):
                outer_module.register_forward_hook(partial(_record_shapes, self, name))
        model.register_forward_hook(partial(_return_hidden, self))

    def run_stage(
        self, running_pass: Pass, call: Callable[[], Any]
    ) -> Any:  # Any: the output of the stage, or the user's result
        """Run `call`, in which the model is called once, for one stage, and return its result."""
        hidden_indices = []
        for block_index in self._blocks:
            if not running_pass.start <= block_index < running_pass.stop:
                hidden_indices.append(block_index)
        block_names = self.cut.blocks
        for block_index in hidden_indices:
            self._container.register_module(
                block_names[block_index], self._stand_ins[block_index]
            )
        random_stream = self._streams[running_pass.stage]
        self.running_pass = running_pass
        random_stream.begin_stream(self._blocks[running_pass.start])
        try:
            return call()
        except StageDone as done:
            return done.hidden
        finally:
            random_stream.end_stream()
            self.running_pass = None
            for block_index in hidden_indices:
                self._container.register_module(
                    block_names[block_index], self._blocks[block_index]
                )

    def begin_pass(
        self, stage: int, received: Tensor | None, seen_call: SeenCall
    ) -> Pass:
        """Create a pass over a stage."""
        start, stop = self.cut.ranges[stage]
        return Pass(
            stage, start, stop, stage == len(self.cut.ranges) - 1, received, seen_call
        )


# Any: the user's arguments and outputs
def _enter_stage(
    block_chain: BlockChain,
    index: int,
    block: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Pass the hidden state of the previous stage to the first block of a stage."""
    running_pass = block_chain.running_pass
    if running_pass is None or running_pass.start != index:
        return None
    running_pass.entered_stage = True
    if running_pass.received is None:
        return None
    if args:
        return (running_pass.received, *args[1:]), kwargs
    _hidden_state_of(args, kwargs, "of this stage")
    return args, {**kwargs, "hidden_states": running_pass.received}


def _leave_stage(
    block_chain: BlockChain,
    index: int,
    block: nn.Module,
    args: object,
    block_output: Any,
) -> None:
    """End the forward after the last block of a stage."""
    running_pass = block_chain.running_pass
    if running_pass is None or running_pass.stop - 1 != index:
        return
    running_pass.left_stage = True
    if block_chain.recording:
        if isinstance(block_output, tuple):
            running_pass.seen_call.returns = len(block_output)
        else:
            running_pass.seen_call.returns = 0
    if isinstance(block_output, tuple) and block_output:
        hidden_state = block_output[0]
    else:
        hidden_state = block_output
    if not isinstance(hidden_state, Tensor):
        raise PrepareError(
            f"a {type(block).__name__} returned a {type(block_output).__name__}, but pipeline stages exchange one tensor. Let blocks "
            "return the hidden state, alone or first in a tuple."
        )
    if not running_pass.final:
        raise _BlocksDone(hidden_state)


def _record_shapes(
    block_chain: BlockChain,
    name: str,
    unit: nn.Module,
    args: object,
    module_output: Any,
) -> None:
    """Record the shapes of the outputs of a module before the blocks."""
    running_pass = block_chain.running_pass
    if (
        block_chain.recording
        and running_pass is not None
        and not running_pass.entered_stage
    ):
        shapes_by_call = running_pass.seen_call.units.setdefault(name, [])
        shapes_by_call.append(output_shapes(module_output))


def _return_hidden(
    block_chain: BlockChain, model: nn.Module, args: object, output: Any
) -> None:
    """End the code around the model's call with the hidden state, on all stages but the last."""
    if block_chain.running_pass is not None and not block_chain.running_pass.final:
        raise StageDone(output)


def _hidden_state_of(args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> Any:
    if args:
        return args[0]
    if "hidden_states" in kwargs:
        return kwargs["hidden_states"]
    raise PrepareError(
        f"block {name!r} is called without a positional argument, so it is unclear which of {sorted(kwargs)} is sent between pipeline "
        "stages. Pass the hidden state as the first argument."
    )
