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
from hasten.strategies.pipeline.passes import BlockChain, Pass, SeenCall, as_plain, from_plain
from hasten.strategies.pipeline.schedule import Learnt
from hasten.strategies.pipeline.stage_plan import StagePlacement
from hasten.strategies.pipeline.travel import StageWire
from hasten.trees import Tree

Signature = tuple[Any, ...]  # Any: shapes and dtypes


class Learner:
    """Cache of the shapes of each kind of batch of each model, inferred on first use."""

    def __init__(self, comm: ProcessGroupComm, place: StagePlacement, device: torch.device) -> None:
        self._comm = comm
        self._place = place
        self._device = device
        self._known = WeakKeyDictionary[nn.Module, dict[Signature, Learnt]]()

    def learn(self, model: nn.Module, line: BlockChain, kind: Signature, call: Callable[[], Any]) -> Learnt:
        """Return the shapes of this kind of micro-batch, inferred by running `call` once. Ranks: the whole pipeline.

        An error here is raised on every rank of the pipeline. Buffers and random state are restored.
        """
        known = self._known.setdefault(model, {})
        if kind in known:
            return known[kind]
        devices = [self._device] if self._device.type == "cuda" else []
        buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
        with torch.no_grad(), torch.random.fork_rng(devices=devices):
            learnt = self._first_pass(line, call)
            for buffer, before in buffers:
                buffer.copy_(before)
        known[kind] = learnt
        return learnt

    def _first_pass(self, line: BlockChain, call: Callable[[], Any]) -> Learnt:
        rank_of, here, wire = self._place.rank_of, self._comm.rank, StageWire(self._comm)
        error: Exception | None = None
        hidden: Tensor | None = None
        learnt = Learnt(SeenCall())
        if 0 in line.stages:
            line.recording = True
            try:
                hidden = self._checked(line, line.begin(0, None, learnt.seen), call)
            except Exception as problem:  # must reach every rank of the pipeline; raised below
                error = problem
            line.recording = False
        sent = self._comm.broadcast_object(None if error else as_plain(learnt.seen), rank_of(0))
        if sent is not None:
            learnt.seen = from_plain(sent)
            for stage in line.stages:
                if stage:
                    hidden = hidden if rank_of(stage - 1) == here else wire.receive(rank_of(stage - 1))
                    error, hidden = self._try_stage(line, stage, hidden, learnt, call, error)
                elif hidden is not None:
                    learnt.outputs[0] = _shape_only(hidden)
                if stage + 1 < self._place.stages and rank_of(stage + 1) != here:
                    wire.send(hidden, rank_of(stage + 1))
            wire.settle()
        vote(self._comm, error, "the first batch through the pipeline")
        return learnt

    def _try_stage(
        self,
        line: BlockChain,
        stage: int,
        received: Tensor | None,
        learnt: Learnt,
        call: Callable[[], Any],
        error: Exception | None,
    ) -> tuple[Exception | None, Any]:
        if received is None or error is not None:
            return error, None
        learnt.inputs[stage] = _shape_only(received)
        try:
            out = self._checked(line, line.begin(stage, received, learnt.seen), call)
        except Exception as problem:  # must reach every rank of the pipeline; raised by the caller
            return problem, None
        learnt.outputs[stage] = _shape_only(out) if isinstance(out, Tensor) else torch.empty((), device="meta")
        return None, out

    def _checked(self, line: BlockChain, at: Pass, call: Callable[[], Any]) -> Any:
        """Return the output of a stage. Raises: PrepareError if it depends on a value that another stage computes."""
        out = line.run(at, call)
        if at.stage and _has_nan(out):
            again = line.begin(at.stage, at.received, at.seen)
            again.fill = 0.0
            if not _has_nan(line.run(again, call)):
                raise PrepareError(
                    f"pipeline stage {at.stage} uses a value that modules of another stage compute before the blocks, but only the "
                    "hidden state of the blocks is sent between stages. Pass the value through the hidden state, compute it from the "
                    "batch, or do not use a pipeline for this model (pp_size=1)."
                )
        return out


def signature(micro: Tree) -> Signature:
    """Return the shapes and dtypes of a micro-batch."""
    return tuple((tuple(x.shape), x.dtype) for x in trees.tensors(micro))


def _shape_only(tensor: Tensor) -> Tensor:
    floating = tensor.is_floating_point()
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta", requires_grad=floating)


def _has_nan(out: Tree) -> bool:
    return any(x.is_floating_point() and bool(torch.isnan(x).any()) for x in trees.tensors(out))
