"""Out of memory in place: a run whose batches do not always fit ends with the weights of one whose batches do.

Memory runs out by torch's own error, raised by a module of the model when it gets more rows than "fit": in forward or in backward, on
some ranks or all, at some steps or all. The reference is the same loop where everything fits, without run_step(). Tolerance: sums in
another order (1e-6 in float32 on weights of about 1; SGD, whose update does not divide by the gradient's own size).
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hasten import Accelerator
from hasten.runtime.context import ProcessContext
from hasten.testing.pool import ranks

STEPS = 4
ROWS = 7


@dataclass
class Trouble:
    """When memory runs out on this rank: for more than `rows` rows, in forward or backward."""

    rows: int = 10**9
    where: str = "forward"
    hits: int = 0


class Hungry(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, trouble: Trouble) -> Tensor:
        ctx.trouble = trouble
        if trouble.where == "forward" and len(x) > trouble.rows:
            trouble.hits += 1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        if ctx.trouble.where == "backward" and len(grad) > ctx.trouble.rows:
            ctx.trouble.hits += 1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return grad, None


class Block(nn.Module):
    def __init__(self, trouble: Trouble | None = None) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.trouble = trouble

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.inner(x))
        return x if self.trouble is None else Hungry.apply(x, self.trouble)


class Net(nn.Module):
    """Blocks, the middle one of which may run out of memory."""

    def __init__(self, trouble: Trouble) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.blocks = nn.ModuleList([Block(), Block(trouble), Block()])
        self.last = nn.Linear(8, 5)
        self.temperature = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x) * self.temperature


def batch_of(step: int, micro: int, rank: int, uneven: bool) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro + rank)
    rows = ROWS + (rank if uneven else 0)
    y = torch.randint(5, (rows,), generator=generator)
    y[torch.rand(rows, generator=generator) < 0.3] = -100
    return {
        "x": torch.randn(rows, 6, generator=generator),
        "y": y,
        "names": [f"{i}" for i in range(rows)],
        "scale": torch.tensor(1.0),
    }


@dataclass(frozen=True)
class Case:
    strategy: str
    every: int
    weighted: bool = False
    precision: str = "no"
    uneven: bool = False
    seed: int = 0
    options: Any = None


def train(
    ctx: ProcessContext, case: Case, trouble: Trouble | None
) -> tuple[dict[str, Tensor], list[float], Accelerator]:
    """Train; with a trouble, through run_step()."""
    rng = random.Random(f"{case.seed}/{ctx.world.rank}")
    own = trouble or Trouble()
    torch.manual_seed(0)
    net = Net(own)
    accelerator = Accelerator(
        strategy=case.strategy,
        gradient_accumulation_steps=case.every,
        mixed_precision=case.precision,
        **(case.options or {}),
    )
    model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.2, momentum=0.5))
    losses = []

    def step(part: dict[str, Any]) -> dict[str, Any]:
        assert len(part["names"]) == len(part["x"]), "rows of all parts belong together"
        logits = model(part["x"]) * part["scale"]
        counted = int((part["y"] != -100).sum())
        loss = nn.functional.cross_entropy(logits.float(), part["y"], ignore_index=-100, reduction="sum")
        loss = loss / (max(counted, 1) if case.weighted else len(part["x"]))
        accelerator.backward(loss, weight=counted if case.weighted else None)
        return {"loss": loss, "rows": len(part["x"]), "logits": logits}

    for number in range(STEPS):
        for micro in range(case.every):
            batch = batch_of(number, micro, ctx.world.rank, case.uneven)
            if trouble is not None:
                own.rows = rng.choice([10**9, 1, 2, 4])
                own.where = rng.choice(["forward", "backward"])
                if number % 2:
                    accelerator.retrying.rows = None  # as if nothing were known: try the whole batch again
            with accelerator.accumulate(model):
                if trouble is None:
                    value = step(batch)
                else:
                    value = accelerator.run_step(step, batch)
                assert value["rows"] == len(batch["x"]) == len(value["logits"])
                losses.append(float(value["loss"].detach()))
                optimizer.step()
                optimizer.zero_grad()
    whole = {
        name: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone()
        for name, p in accelerator.unwrap_model(model).named_parameters()
    }
    return whole, losses, accelerator


def check(ctx: ProcessContext, case: Case, atol: float = 1e-6) -> None:
    expected, losses, _ = train(ctx, case, None)
    trouble = Trouble()
    found, our_losses, _ = train(ctx, case, trouble)
    hits = ctx.world.all_reduce(torch.tensor(trouble.hits))
    assert int(hits) > 0, "memory did run out"
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=atol, msg=lambda text, name=name: f"{case} {name}: {text}")
    torch.testing.assert_close(torch.tensor(our_losses), torch.tensor(losses), rtol=0, atol=20 * atol)


@ranks(1, 2, 3)
@pytest.mark.parametrize("strategy", ["auto", "fsdp"])
def test_weights_equal_the_run_that_fits(ctx: ProcessContext, strategy: str) -> None:
    for every, weighted in ((1, False), (3, True)):
        check(ctx, Case(strategy, every, weighted, seed=every))
