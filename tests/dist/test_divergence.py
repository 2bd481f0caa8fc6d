"""Ranks that drift apart are reported with the right cause, tensor, ranks and update; ranks that do not are left in peace."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from hasten import Accelerator
from hasten.config.parallel import DistributedDataParallelKwargs, ParallelismConfig
from hasten.errors import DivergenceError, HastenWarning
from hasten.optim.local_sgd import LocalSGD
from hasten.runtime.context import ProcessContext
from hasten.testing.pool import ranks
from hasten.testing.toys import TinyLM, next_token_loss, seeded

EVERY = 4
BAD_AT = 6
"""The update after which a run goes wrong: between the checks of updates 4 and 8."""


class Net(nn.Module):
    """Two layers, a buffer of its own, and running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8)
        self.last = nn.Linear(8, 3)
        self.register_buffer("seen", torch.zeros(()))
        self.seen: Tensor

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(torch.tanh(self.norm(self.first(x))))
        return out


@dataclass
class Run:
    """A run that a case may spoil after any update."""

    accelerator: Accelerator
    model: Any
    inner: Net
    optimizer: Any
    scheduler: Any
    loader: Any
    batches: Any = None
    forward: Callable[[Tensor], Tensor] | None = None

    def train(self, spoil: Callable[[Run, int], None], steps: int = 12) -> None:
        step = 0
        while step < steps:
            self.batches = iter(self.loader)
            for x, y in self.batches:
                forward = self.forward or self.model
                self.accelerator.backward(nn.functional.cross_entropy(forward(x), y))
                self.optimizer.step()
                self.optimizer.zero_grad()
                step += 1
                spoil(self, step)
                if step == steps:
                    break
        self.accelerator.end_training()


def start(sgd: bool = False, buffers: bool = True, **settings: Any) -> Run:
    if not buffers:
        settings["ddp"] = DistributedDataParallelKwargs(broadcast_buffers=False)
    accelerator = Accelerator(divergence_every=EVERY, **settings)
    net = seeded(Net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1) if sgd else torch.optim.AdamW(net.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    g = torch.Generator().manual_seed(3)
    world = accelerator.num_processes
    data = TensorDataset(torch.randn(10 * 4 * world, 6, generator=g), torch.randint(0, 3, (10 * 4 * world,), generator=g))
    loader = DataLoader(data, batch_size=4, shuffle=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)  # torch 2.13's new name
        model, optimizer, scheduler, loader = accelerator.prepare(net, optimizer, scheduler, loader)
    return Run(accelerator, model, net, optimizer, scheduler, loader)


Spoil = Callable[[Run, int], None]


def on_last_rank(act: Callable[[Run], None], at: int = BAD_AT) -> Spoil:
    def spoil(run: Run, step: int) -> None:
        if step == at and run.accelerator.is_last_process:
            with torch.no_grad():
                act(run)

    return spoil


def everywhere(act: Callable[[Run], None], at: int = BAD_AT) -> Spoil:
    def spoil(run: Run, step: int) -> None:
        if step == at:
            with torch.no_grad():
                act(run)

    return spoil


def edit_weight(run: Run) -> None:
    run.inner.last.weight[0, 0] += 1e-6


def make_nan(run: Run) -> None:
    run.inner.last.bias[1] = float("nan")


def load_weights(run: Run) -> None:
    run.inner.load_state_dict(seeded(Net, 5).state_dict())


def unseeded_layer(run: Run) -> None:
    torch.manual_seed(100 + run.accelerator.process_index)
    run.inner.first.reset_parameters()


def edit_state(run: Run) -> None:
    run.optimizer.state[run.inner.first.weight]["exp_avg"][0, 0] += 1e-6


def own_rate(run: Run) -> None:
    run.optimizer.param_groups[0]["lr"] *= 0.5


def extra_scheduler_step(run: Run) -> None:
    run.scheduler.scheduler.step()


def extra_step(run: Run) -> None:
    run.optimizer.step()


def extra_batch(run: Run) -> None:
    next(run.batches)


def past_the_model(run: Run) -> None:
    run.forward = nn.Module.__call__.__get__(run.inner)


def write_buffer(run: Run) -> None:
    run.inner.seen.fill_(1 + run.accelerator.process_index)


@dataclass(frozen=True)
class Case:
    """A way to drift apart, and what the report must say."""

    spoil: Spoil
    cause: str
    name: str
    kwargs: tuple[tuple[str, Any], ...] = ()
    agreed: bool = True
    """Whether an earlier check had found all ranks equal."""


def nothing(run: Run, step: int) -> None:
    return None


CASES: dict[str, Case] = {
    "edit in place": Case(on_last_rank(edit_weight), "outside", "last.weight"),
    "edit in place, sgd": Case(on_last_rank(edit_weight), "outside", "last.weight", (("sgd", True),)),
    "load on one rank": Case(on_last_rank(load_weights), "outside", "first.weight"),
    "layer initialised anew without a seed": Case(everywhere(unseeded_layer), "outside", "first.weight"),
    "never equal": Case(everywhere(unseeded_layer, at=0), "initialisation", "first.weight", agreed=False),
    "edited optimizer state": Case(on_last_rank(edit_state), "state", "first.weight (exp_avg)"),
    "own learning rate": Case(on_last_rank(own_rate), "settings", "param_groups[0]['lr']"),
    "scheduler on one rank": Case(on_last_rank(extra_scheduler_step), "settings", "param_groups[0]['lr']"),
    "step on one rank": Case(on_last_rank(extra_step), "updates", "first.weight"),
    "batch on one rank": Case(on_last_rank(extra_batch), "data", "position of loader 0"),
    "gradients not averaged": Case(everywhere(past_the_model), "gradients", "first.weight"),
    "gradients not averaged, sgd": Case(everywhere(past_the_model), "gradients", "first.weight", (("sgd", True),)),
    "buffer": Case(everywhere(write_buffer), "buffers", "seen", (("buffers", False), ("divergence_ignore", ["norm.*"]))),
}


@ranks(2, 3)
@pytest.mark.parametrize("name", CASES)
def test_the_report_names_cause_tensor_ranks_and_update(ctx: ProcessContext, name: str) -> None:
    case = CASES[name]
    run = start(**dict(case.kwargs))
    case.spoil(run, 0)
    with pytest.raises(DivergenceError) as caught:
        run.train(case.spoil)
    error = caught.value
    assert (error.cause, error.name) == (case.cause, case.name), str(error)
    assert error.step == (2 * EVERY if case.agreed else 1)
    agreed = f"all agreed at update {EVERY}" if case.agreed else "never compared before"
    assert agreed in str(error)
    last = ctx.world.size - 1
    assert last in error.ranks and 0 not in error.ranks
    told = ctx.world.all_gather_object(str(error))
    assert len(set(told)) == 1, "every rank stops with the same words"
