"""One training step through torch's pipeline schedules: micro-batches, losses and the stages of this rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, assert_never

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)

from hasten import trees
from hasten.comm.process_group import ProcessGroupComm
from hasten.config.sections.parallel import PipelineSchedule
from hasten.errors import HastenError, StepError
from hasten.extensions.pipeline.passes import BlockChain, SeenCall
from hasten.optim.gradients import leave_if_weightless
from hasten.optim.window import Number
from hasten.trees import Tree

LossOf = Callable[[nn.Module, Tree], Tensor]
WeightOf = Callable[[Tree], Number]
"""Returns the number of tokens or samples that the mean loss of a batch averages over."""
_IGNORED: Final = -100
"""Label that losses of torch and transformers leave out."""


@dataclass(slots=True)
class LearntShapes:
    """Shapes of one kind of micro-batch, from one pass through the pipeline."""

    seen: SeenCall
    inputs: dict[int, Tensor] = field(default_factory=dict)
    """Input of each stage of this rank, as a meta tensor."""
    outputs: dict[int, Tensor] = field(default_factory=dict)
    """Output of each stage of this rank, as a meta tensor."""


@dataclass(slots=True)
class Work:
    """Micro-batches, loss function and results of the running step."""

    micros: Sequence[Tree] = ()
    loss_of: LossOf | None = None
    factor: Tensor | float = 1.0
    shares: Sequence[Tensor | float] = ()
    """Weight of each micro-batch's loss in the loss of the batch."""
    losses: list[Tensor] = field(default_factory=list)


class _StageModule(nn.Module):
    """A stage for torch's schedules: maps the previous stage's hidden state to the next hidden state, or to the loss."""

    def __init__(
        self,
        model: nn.Module,
        block_chain: BlockChain,
        stage: int,
        seen_call: SeenCall,
        step_work: Work,
    ) -> None:
        super().__init__()
        self.model = model
        self.line = block_chain
        self.stage = stage
        self.seen = seen_call
        self.work = step_work

    def forward(self, *received: Tensor, where: Tensor) -> Tensor:
        """Return the output of this stage for micro-batch number `where`."""
        step_work = self.work
        block_chain = self.line
        assert step_work.loss_of is not None, "a step is running"
        micro_batch = step_work.micros[int(where)]
        loss_of = step_work.loss_of
        running_pass = block_chain.begin_pass(
            self.stage, received[0] if self.stage else None, self.seen
        )
        stage_output = block_chain.run_stage(
            running_pass, lambda: loss_of(self.model, micro_batch)
        )
        if not running_pass.final:
            hidden_state: Tensor = stage_output
            return hidden_state.contiguous()
        loss = checked_loss(stage_output)
        loss_share = step_work.shares[int(where)]
        weighted_loss = loss.detach().float() * loss_share
        if isinstance(loss_share, Tensor):
            leave_if_weightless(loss, loss_share)
            weighted_loss = torch.where(
                loss_share == 0, torch.zeros_like(weighted_loss), weighted_loss
            )  # a mean over no labels is NaN
        step_work.losses.append(weighted_loss)
        return loss * (loss_share * step_work.factor)


def checked_loss(returned_loss: Any) -> Tensor:  # Any: result of the user's function
    """Return the loss as a scalar. Raises: StepError if it is not a tensor with one element."""
    if isinstance(returned_loss, Tensor) and returned_loss.numel() == 1:
        return returned_loss.reshape(())
    if isinstance(returned_loss, Tensor):
        description = f"a tensor of shape {tuple(returned_loss.shape)}"
    else:
        description = f"a {type(returned_loss).__name__}"
    raise StepError(
        f"loss_of returned {description}, but there is one loss per micro-batch. Return the mean over its samples."
    )


class Stepper:
    """Schedule over this rank's stages, for one kind of micro-batch."""

    def __init__(
        self,
        model: nn.Module,
        block_chain: BlockChain,
        learnt: LearntShapes,
        num_micro_batches: int,
        schedule: PipelineSchedule,
        comm: ProcessGroupComm,
    ) -> None:
        self._work = Work()
        self._first = 0 in block_chain.stages
        self._where = torch.arange(num_micro_batches)
        num_stages = len(block_chain.cut.ranges)
        stages = []
        for stage in block_chain.stages:
            module = _StageModule(model, block_chain, stage, learnt.seen, self._work)
            example_input = learnt.inputs[stage] if stage else self._where[:1]
            stages.append(
                PipelineStage(
                    module,
                    stage,
                    num_stages,
                    block_chain.device,
                    input_args=(example_input,),
                    output_args=(learnt.outputs[stage],),
                    group=comm.group,
                )
            )
        self._schedule = _make_schedule(schedule, stages, num_micro_batches)

    def step(
        self,
        micro_batches: Sequence[Tree],
        loss_of: LossOf,
        loss_factor: Tensor | float,
        loss_shares: Sequence[Tensor | float],
    ) -> Tensor | None:
        """Run forward and backward of all micro-batches; return the weighted loss on the rank of the last stage, else None."""
        step_work = self._work
        step_work.micros = micro_batches
        step_work.loss_of = loss_of
        step_work.factor = loss_factor
        step_work.shares = loss_shares
        args = (self._where,) if self._first else ()
        try:
            self._schedule.step(
                *args,
                target=self._where,
                losses=[],
                return_outputs=False,
                where=self._where,
            )
            return torch.stack(step_work.losses).sum() if step_work.losses else None
        except RuntimeError as error:
            # torch wraps errors of a stage
            if isinstance(error.__cause__, HastenError):
                raise error.__cause__ from None
            raise
        finally:
            step_work.micros = ()
            step_work.loss_of = None
            step_work.losses.clear()


def _make_schedule(
    schedule: PipelineSchedule, stages: list[Any], num_micro_batches: int
) -> Any:  # Any: torch's classes share a private base
    schedule_options: dict[str, Any] = {
        "n_microbatches": num_micro_batches,
        "loss_fn": _return_loss,
        "scale_grads": False,
    }
    match schedule:
        case "gpipe":
            return ScheduleGPipe(stages[0], **schedule_options)
        case "1f1b":
            return Schedule1F1B(stages[0], **schedule_options)
        case "interleaved_1f1b":
            return ScheduleInterleaved1F1B(stages, **schedule_options)
        case "interleaved_zero_bubble":
            return ScheduleInterleavedZeroBubble(stages, **schedule_options)
        case "zbv_zero_bubble":
            return ScheduleZBVZeroBubble(stages, **schedule_options)
        case "loop_bfs":
            return ScheduleLoopedBFS(stages, **schedule_options)
        case other:
            assert_never(other)


def _return_loss(loss: Tensor, target: Tensor) -> Tensor:
    """Return the output of the last stage, which is the loss already."""
    return loss


def refuse_unweighted(batch: Tree) -> None:
    """Raise StepError if the batch has ignored labels, whose number differs between micro-batches."""
    for tensor in trees.tensors(batch):
        if tensor.dtype == torch.int64 and bool((tensor == _IGNORED).any()):
            raise StepError(
                f"the batch has labels of {_IGNORED}, which a loss leaves out, so that its micro-batches average over different numbers of "
                "labels; with equal weights the loss would not be that of the whole batch. Pass the number of labels of each micro-batch: "
                "forward_backward(model, batch, loss_of, weight=lambda batch: (batch['labels'] != -100).sum())."
            )


def relative_weights(amounts: list[Number], device: torch.device) -> list[Tensor]:
    """Return each amount divided by their sum, zero where the sum is zero."""
    amount_tensors = []
    for amount in amounts:
        amount_tensors.append(
            torch.as_tensor(amount, dtype=torch.float64).to(device, torch.float32)
        )
    stacked_amounts = torch.stack(amount_tensors)
    total_amount = stacked_amounts.sum()
    return list(
        torch.where(
            total_amount == 0,
            total_amount,
            stacked_amounts / total_amount.clamp(min=torch.finfo(torch.float32).tiny),
        )
    )
