"""A plan's bytes of parameters, gradients and optimizer state are exactly those each rank holds after a real step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hasten import Accelerator
from hasten.config.sections.parallel import FullyShardedDataParallelPlugin
from hasten.extensions.planning.plan.memory import count_rank_bytes
from hasten.extensions.planning.plan.trace import ModelStructure
from hasten.extensions.planning.plan.traced import Candidate, ModelTrace, OptimizerFacts
from hasten.runtime.context import ProcessContext
from hasten.runtime.mesh_plan import SHARD
from hasten.testing.pool import ranks
from hasten.testing.toys import TinyLM, next_token_loss, seeded


def uneven() -> TinyLM:
    """A model whose parameters do not divide evenly by any number of ranks here."""
    return seeded(lambda: TinyLM(vocab=19, width=6, heads=2, depth=3, context=5))


def size(value: Any) -> int:  # Any: state of an optimizer
    local = value.to_local() if isinstance(value, DTensor) else value
    return local.numel() * local.element_size() if isinstance(local, Tensor) else 0


def planned(net: nn.Module, facts: OptimizerFacts) -> ModelTrace:
    structure = ModelStructure()
    structure.inspect_models([net])
    return ModelTrace(
        name="toy", parameters=structure.parameters, optimizer=facts, variants=()
    )


@ranks(2, exhaustive=(4,))
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("kind", ["adamw", "momentum", "sgd"])
def test_each_rank_holds_exactly_what_is_planned(
    ctx: ProcessContext, strategy: str, kind: str
) -> None:
    net = uneven()
    states = {"adamw": (4, 4), "momentum": (4,), "sgd": ()}[kind]
    trace = planned(
        net, OptimizerFacts(states=states, counter_bytes=4 if kind == "adamw" else 0)
    )
    optimizer: torch.optim.Optimizer = (
        torch.optim.AdamW(net.parameters())
        if kind == "adamw"
        else torch.optim.SGD(
            net.parameters(), lr=0.1, momentum=0.9 if kind == "momentum" else 0.0
        )
    )
    accelerator = Accelerator(
        strategy=strategy, fsdp_plugin=FullyShardedDataParallelPlugin()
    )
    prepared: tuple[nn.Module, torch.optim.Optimizer] = accelerator.prepare(
        net, optimizer
    )
    model, optimizer = prepared
    batch = torch.arange(20).view(4, 5) % 19
    accelerator.backward(next_token_loss(model(batch), batch))
    optimizer.step()
    parameters = list(model.parameters())
    actual_bytes: tuple[float, float, float] = (
        sum(map(size, parameters)),
        sum(size(p.grad) for p in parameters if p.grad is not None),
        sum(
            size(value)
            for state in optimizer.state.values()
            for value in state.values()
        ),
    )
    candidate = Candidate(mesh=accelerator.ctx.mesh, sharded=strategy == "fsdp")
    assert (
        count_rank_bytes(trace, candidate, accelerator.ctx.mesh.index(ctx.rank, *SHARD))
        == actual_bytes
    )
    accelerator.end_training()
