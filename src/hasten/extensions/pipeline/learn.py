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
from hasten.extensions.pipeline.schedule import LearntShapes
from hasten.extensions.pipeline.stage_plan import StagePlacement
from hasten.strategies.micro_batches import broadcast_output
from hasten.trees import Tree

Signature = tuple[Any, ...]  # Any: shapes and dtypes


class Learner:
    """Cache of the shapes of each kind of batch of each model, inferred on first use."""

    def __init__(
        self,
        comm: ProcessGroupComm,
        stage_placement: StagePlacement,
        device: torch.device,
    ) -> None:
        self._comm = comm
        self._place = stage_placement
        self._device = device
        self._shapes = WeakKeyDictionary[nn.Module, dict[Signature, LearntShapes]]()

    def learn_shapes(
        self,
        model: nn.Module,
        block_chain: BlockChain,
        kind: Signature,
        run_forward: Callable[[], Any],
    ) -> LearntShapes:
        """Return the shapes of this kind of micro-batch, inferred by running `call` once. Ranks: the whole pipeline.

        An error here is raised on every rank of the pipeline. Buffers and random state are restored.
        """
        shapes_by_kind = self._shapes.setdefault(model, {})
        if kind in shapes_by_kind:
            return shapes_by_kind[kind]
        cuda_devices = [self._device] if self._device.type == "cuda" else []
        saved_buffers = []
        for model_buffer in model.buffers():
            saved_buffers.append((model_buffer, model_buffer.clone()))
        with torch.no_grad(), torch.random.fork_rng(devices=cuda_devices):
            learnt_shapes = self._first_pass(block_chain, run_forward)
            for model_buffer, saved_values in saved_buffers:
                model_buffer.copy_(saved_values)
        shapes_by_kind[kind] = learnt_shapes
        return learnt_shapes

    def _first_pass(
        self, block_chain: BlockChain, run_forward: Callable[[], Any]
    ) -> LearntShapes:
        learnt_shapes = LearntShapes(SeenCall())
        stage_error = None
        hidden_state: Any = None  # Any: the output of the last stage
        for stage in range(self._place.stages):
            owner_rank = self._place.rank_of(stage)
            if owner_rank == self._comm.rank:
                try:
                    hidden_state = self._run_stage(
                        block_chain, stage, hidden_state, learnt_shapes, run_forward
                    )
                # must reach every rank of the pipeline; raised below
                except Exception as problem:
                    stage_error = problem
                    hidden_state = None
            if stage == 0:
                learnt_shapes.seen = self._comm.broadcast_object(
                    learnt_shapes.seen, owner_rank
                )
            if stage + 1 < self._place.stages:
                hidden_state = broadcast_output(hidden_state, self._comm, owner_rank)
                if hidden_state is None:
                    break
        vote(self._comm, stage_error, "the first batch through the pipeline")
        return learnt_shapes

    def _run_stage(
        self,
        block_chain: BlockChain,
        stage: int,
        hidden_state: Any,
        learnt_shapes: LearntShapes,
        run_forward: Callable[[], Any],
    ) -> Any:
        """Return the output of a stage of this rank, whose shapes are recorded."""
        if stage:
            learnt_shapes.inputs[stage] = _shape_only(hidden_state)
        block_chain.recording = stage == 0
        try:
            stage_output = self._run_checked(
                block_chain,
                block_chain.begin_pass(
                    stage, hidden_state if stage else None, learnt_shapes.seen
                ),
                run_forward,
            )
        finally:
            block_chain.recording = False
        if isinstance(stage_output, Tensor):
            learnt_shapes.outputs[stage] = _shape_only(stage_output)
        else:
            learnt_shapes.outputs[stage] = torch.empty((), device="meta")
        return stage_output

    def _run_checked(
        self,
        block_chain: BlockChain,
        running_pass: Pass,
        run_forward: Callable[[], Any],
    ) -> Any:
        """Return the output of a stage. Raises: PrepareError if it depends on a value that another stage computes."""
        stage_output = block_chain.run_stage(running_pass, run_forward)
        if running_pass.stage and _has_nan(stage_output):
            second_pass = block_chain.begin_pass(
                running_pass.stage, running_pass.received, running_pass.seen_call
            )
            second_pass.fill = 0.0
            if not _has_nan(block_chain.run_stage(second_pass, run_forward)):
                raise PrepareError(
                    f"pipeline stage {running_pass.stage} uses a value that modules of another stage compute before the blocks, but only the "
                    "hidden state of the blocks is sent between stages. Pass the value through the hidden state, compute it from the "
                    "batch, or do not use a pipeline for this model (pp_size=1)."
                )
        return stage_output


def batch_signature(micro_batch: Tree) -> Signature:
    """Return the shapes and dtypes of a micro-batch."""
    return tuple(
        (tuple(tensor.shape), tensor.dtype) for tensor in trees.tensors(micro_batch)
    )


def _shape_only(tensor: Tensor) -> Tensor:
    floating = tensor.is_floating_point()
    return torch.empty(
        tensor.shape, dtype=tensor.dtype, device="meta", requires_grad=floating
    )


def _has_nan(stage_output: Tree) -> bool:
    return any(
        tensor.is_floating_point() and bool(torch.isnan(tensor).any())
        for tensor in trees.tensors(stage_output)
    )
