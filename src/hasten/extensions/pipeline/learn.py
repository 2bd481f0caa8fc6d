"""Shape inference for a kind of batch: one forward of one micro-batch through all stages of a pipeline."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from hasten import trees
from hasten.comm.agreement import vote
from hasten.comm.process_group import ProcessGroupComm
from hasten.errors import PrepareError
from hasten.extensions.pipeline.passes import BlockChain, Pass, SeenCall
from hasten.extensions.pipeline.schedule import Learnt
from hasten.extensions.pipeline.stage_plan import StagePlacement
from hasten.strategies.micro_batches import share
from hasten.trees import Tree

Signature = tuple[Any, ...]  # Any: shapes and dtypes


class Learner:
    """Cache of the shapes of each kind of batch of each model, inferred on first use."""

    def __init__(
        self, comm: ProcessGroupComm, place: StagePlacement, device: torch.device
    ) -> None:
        self._comm = comm
        self._place = place
        self._device = device
        self._shapes = WeakKeyDictionary[nn.Module, dict[Signature, Learnt]]()

    def learn(
        self,
        model: nn.Module,
        line: BlockChain,
        kind: Signature,
        call: Callable[[], Any],
    ) -> Learnt:
        """Return the shapes of this kind of micro-batch, inferred by running `call` once. Ranks: the whole pipeline.

        An error here is raised on every rank of the pipeline. Buffers and random state are restored.
        """
        shapes_by_kind = self._shapes.setdefault(model, {})
        if kind in shapes_by_kind:
            return shapes_by_kind[kind]
        devices = [self._device] if self._device.type == "cuda" else []
        buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
        with torch.no_grad(), torch.random.fork_rng(devices=devices):
            learnt = self._first_pass(line, call)
            for buffer, saved_values in buffers:
                buffer.copy_(saved_values)
        shapes_by_kind[kind] = learnt
        return learnt

    def _first_pass(self, line: BlockChain, call: Callable[[], Any]) -> Learnt:
        learnt, error = Learnt(SeenCall()), None
        hidden: Any = None  # Any: the output of the last stage
        for stage in range(self._place.stages):
            owner = self._place.rank_of(stage)
            if owner == self._comm.rank:
                try:
                    hidden = self._run_stage(line, stage, hidden, learnt, call)
                # must reach every rank of the pipeline; raised below
                except Exception as problem:
                    error, hidden = problem, None
            if stage == 0:
                learnt.seen = self._comm.broadcast_object(learnt.seen, owner)
            if stage + 1 < self._place.stages:
                hidden = share(hidden, self._comm, owner)
                if hidden is None:
                    break
        vote(self._comm, error, "the first batch through the pipeline")
        return learnt

    def _run_stage(
        self,
        line: BlockChain,
        stage: int,
        hidden: Any,
        learnt: Learnt,
        call: Callable[[], Any],
    ) -> Any:
        """Return the output of a stage of this rank, whose shapes are recorded."""
        if stage:
            learnt.inputs[stage] = _shape_only(hidden)
        line.recording = stage == 0
        try:
            output = self._run_checked(
                line, line.begin(stage, hidden if stage else None, learnt.seen), call
            )
        finally:
            line.recording = False
        learnt.outputs[stage] = (
            _shape_only(output)
            if isinstance(output, Tensor)
            else torch.empty((), device="meta")
        )
        return output

    def _run_checked(
        self, line: BlockChain, running_pass: Pass, call: Callable[[], Any]
    ) -> Any:
        """Return the output of a stage. Raises: PrepareError if it depends on a value that another stage computes."""
        output = line.run(running_pass, call)
        if running_pass.stage and _has_nan(output):
            second_pass = line.begin(
                running_pass.stage, running_pass.received, running_pass.seen
            )
            second_pass.fill = 0.0
            if not _has_nan(line.run(second_pass, call)):
                raise PrepareError(
                    f"pipeline stage {running_pass.stage} uses a value that modules of another stage compute before the blocks, but only the "
                    "hidden state of the blocks is sent between stages. Pass the value through the hidden state, compute it from the "
                    "batch, or do not use a pipeline for this model (pp_size=1)."
                )
        return output


def signature(micro: Tree) -> Signature:
    """Return the shapes and dtypes of a micro-batch."""
    return tuple((tuple(x.shape), x.dtype) for x in trees.tensors(micro))


def _shape_only(tensor: Tensor) -> Tensor:
    floating = tensor.is_floating_point()
    return torch.empty(
        tensor.shape, dtype=tensor.dtype, device="meta", requires_grad=floating
    )


def _has_nan(output: Tree) -> bool:
    return any(
        x.is_floating_point() and bool(torch.isnan(x).any())
        for x in trees.tensors(output)
    )
