"""The losses of one training run, in plain torch and through an Accelerator, over phases of accumulation and clipping."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, nn

from hasten import Accelerator
from hasten.runtime.mesh_plan import BATCH, Axis

PHASES: Final = ((1, False), (1, True), (3, False), (3, True))
"""Accumulation, and whether gradients are clipped: a run goes through all of them, one after the other."""
MAX_NORM: Final = 0.1

Batch = tuple[Tensor, ...]
"""Tensors whose first dimension counts rows."""


@dataclass(frozen=True, slots=True)
class Task:
    """What is trained, on what."""

    build: Callable[[], nn.Module]
    batches: Callable[[int], list[Batch]]
    """As many batches as asked for; the rows of each divide by the accumulation times the ranks that read."""
    loss_of: Callable[[nn.Module, Batch], Tensor]
    """The mean loss over the rows of a batch."""


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


def forward_then_backward(accelerator: Accelerator, net: nn.Module, batch: Batch, task: Task) -> Tensor:
    """Return the loss of a batch, after its forward and backward."""
    loss = task.loss_of(net, batch)
    accelerator.backward(loss)
    return loss.detach()


def through_stages(accelerator: Accelerator, net: nn.Module, batch: Batch, task: Task) -> Tensor:
    """Return the loss of a batch that passes through a pipeline."""
    return accelerator.forward_backward(net, batch, lambda net, micro: task.loss_of(net, micro))


def over_parts(accelerator: Accelerator, net: nn.Module, batch: Batch, task: Task) -> Tensor:
    """Return the loss of this rank's part of sequences, of which each tensor's second dimension counts the tokens."""
    given = tuple(tensor.clone() for tensor in batch)
    with accelerator.context_parallel(given, [1] * len(given), labels=None):
        return forward_then_backward(accelerator, net, given, task)


def hasten_losses(
    accelerator: Accelerator, task: Task, steps: int, one_pass: OnePass = forward_then_backward
) -> list[float]:
    """The same run spread over the mesh of `accelerator`; the mean of the ranks' losses. Ranks: every rank."""
    net = task.build()
    net, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=1e-2, foreach=True))
    mesh, losses = accelerator.ctx.mesh, []
    readers, reader = mesh.size(*BATCH), mesh.index(accelerator.process_index, *BATCH)
    for step, batch in enumerate(task.batches(steps)):
        every, clips = _phase(step, steps)
        accelerator.gradient_accumulation_steps = every
        total = torch.zeros(())
        for micro in zip(*(tensor.chunk(readers)[reader].chunk(every) for tensor in batch), strict=True):
            with accelerator.accumulate(net):
                total += one_pass(accelerator, net, micro, task).cpu() / every
                if clips:
                    accelerator.clip_grad_norm_(net.parameters(), MAX_NORM)
                optimizer.step()
                optimizer.zero_grad()
        losses.append(float(total))
    everyone: list[list[float]] = accelerator.comm.all_gather_object(losses)
    for rank, mine in enumerate(everyone):
        assert mine == everyone[mesh.peers(rank, Axis.PP)[0]], "ranks of one pipeline return the same loss"
    mean: list[float] = torch.tensor(everyone).mean(0).tolist()
    return mean


def _phase(step: int, steps: int) -> tuple[int, bool]:
    return PHASES[step * len(PHASES) // steps]
