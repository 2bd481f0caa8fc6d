"""Losses of one training run, in plain torch and with an Accelerator, over phases of accumulation and clipping."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, nn

from hasten import Accelerator
from hasten.runtime.mesh_plan import BATCH, Axis

PHASES: Final = ((1, False), (1, True), (3, False), (3, True))
"""Phases of a run: the accumulation steps, and whether gradients are clipped."""
MAX_NORM: Final = 0.1

Batch = tuple[Tensor, ...]
"""Tensors whose first dimension counts rows."""


@dataclass(frozen=True, slots=True)
class Task:
    """Model, data and loss of a training."""

    build: Callable[[], nn.Module]
    batches: Callable[[int], list[Batch]]
    """Returns this number of batches, whose rows are divisible by the accumulation steps times the reading ranks."""
    loss_of: Callable[[nn.Module, Batch], Tensor]
    """Returns the mean loss over the rows of a batch."""


def plain_losses(task: Task, steps: int) -> list[float]:
    """Return the loss of each of `steps` AdamW steps on whole batches."""
    net, losses = task.build(), []
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, foreach=True)
    for step, batch in enumerate(task.batches(steps)):
        loss = task.loss_of(net, batch)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        if _phase(step, steps)[1]:
            nn.utils.clip_grad_norm_(net.parameters(), MAX_NORM)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


OnePass = Callable[[Accelerator, nn.Module, Batch, Task], Tensor]


def forward_then_backward(
    accelerator: Accelerator, net: nn.Module, batch: Batch, task: Task
) -> Tensor:
    """Run forward and backward on a batch and return its loss."""
    loss = task.loss_of(net, batch)
    accelerator.backward(loss)
    return loss.detach()


def through_stages(
    accelerator: Accelerator, net: nn.Module, batch: Batch, task: Task
) -> Tensor:
    """Run a batch through a pipeline and return its loss."""
    return accelerator.forward_backward(
        net, batch, lambda net, micro: task.loss_of(net, micro)
    )


def over_parts(
    accelerator: Accelerator, net: nn.Module, batch: Batch, task: Task
) -> Tensor:
    """Run this rank's shard of sequences, whose tokens are the second dimension of each tensor, and return its loss."""
    shards = tuple(tensor.clone() for tensor in batch)
    with accelerator.context_parallel(shards, [1] * len(shards), labels=None):
        return forward_then_backward(accelerator, net, shards, task)


def hasten_losses(
    accelerator: Accelerator,
    task: Task,
    steps: int,
    one_pass: OnePass = forward_then_backward,
) -> list[float]:
    """Return the mean over ranks of the losses of the same run on the mesh of `accelerator`. Ranks: every rank."""
    net = task.build()
    net, optimizer = accelerator.prepare(
        net, torch.optim.AdamW(net.parameters(), lr=1e-2, foreach=True)
    )
    mesh, losses = accelerator.ctx.mesh, []
    readers, reader = mesh.size(*BATCH), mesh.index(accelerator.process_index, *BATCH)
    for step, batch in enumerate(task.batches(steps)):
        every, clips = _phase(step, steps)
        accelerator.gradient_accumulation_steps = every
        total = torch.zeros(())
        for micro in zip(
            *(tensor.chunk(readers)[reader].chunk(every) for tensor in batch),
            strict=True,
        ):
            with accelerator.accumulate(net):
                total += one_pass(accelerator, net, micro, task).cpu() / every
                if clips:
                    accelerator.clip_grad_norm_(net.parameters(), MAX_NORM)
                optimizer.step()
                optimizer.zero_grad()
        losses.append(float(total))
    everyone: list[list[float]] = accelerator.ctx.world.all_gather_object(losses)
    for rank, rank_losses in enumerate(everyone):
        assert rank_losses == everyone[mesh.peers(rank, Axis.PP)[0]], (
            "ranks of one pipeline return the same loss"
        )
    mean: list[float] = torch.tensor(everyone).mean(0).tolist()
    return mean


def _phase(step: int, steps: int) -> tuple[int, bool]:
    return PHASES[step * len(PHASES) // steps]
