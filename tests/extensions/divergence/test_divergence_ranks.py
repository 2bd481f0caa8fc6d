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

from hasten import Accelerator, LocalSGD
from hasten.config.sections.parallel import (
    DistributedDataParallelKwargs,
    ParallelismConfig,
)
from hasten.errors import DivergenceError, HastenWarning
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
        settings["kwargs_handlers"] = [
            DistributedDataParallelKwargs(broadcast_buffers=False)
        ]
    trust = {"divergence_every": EVERY} | settings.pop("trust", {})
    accelerator = Accelerator(trust=trust, **settings)
    net = seeded(Net)
    optimizer = (
        torch.optim.SGD(net.parameters(), lr=0.1)
        if sgd
        else torch.optim.AdamW(net.parameters(), lr=1e-2)
    )
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    g = torch.Generator().manual_seed(3)
    world = accelerator.num_processes
    data = TensorDataset(
        torch.randn(10 * 4 * world, 6, generator=g),
        torch.randint(0, 3, (10 * 4 * world,), generator=g),
    )
    loader = DataLoader(data, batch_size=4, shuffle=True)
    with warnings.catch_warnings():
        # torch 2.13's new name
        warnings.filterwarnings(
            "ignore", "`broadcast_buffers` is deprecated", FutureWarning
        )
        model, optimizer, scheduler, loader = accelerator.prepare(
            net, optimizer, scheduler, loader
        )
    return Run(accelerator, model, net, optimizer, scheduler, loader)


Spoil = Callable[[Run, int], None]


def on_last_rank(act: Callable[[Run], None], bad_step: int = BAD_AT) -> Spoil:
    def spoil(run: Run, step: int) -> None:
        if step == bad_step and run.accelerator.process.is_last_process:
            with torch.no_grad():
                act(run)

    return spoil


def everywhere(act: Callable[[Run], None], bad_step: int = BAD_AT) -> Spoil:
    def spoil(run: Run, step: int) -> None:
        if step == bad_step:
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
    "edit in place, sgd": Case(
        on_last_rank(edit_weight), "outside", "last.weight", (("sgd", True),)
    ),
    "load on one rank": Case(on_last_rank(load_weights), "outside", "first.weight"),
    "layer initialised anew without a seed": Case(
        everywhere(unseeded_layer), "outside", "first.weight"
    ),
    "never equal": Case(
        everywhere(unseeded_layer, bad_step=0),
        "initialisation",
        "first.weight",
        agreed=False,
    ),
    "edited optimizer state": Case(
        on_last_rank(edit_state), "state", "first.weight (exp_avg)"
    ),
    "own learning rate": Case(
        on_last_rank(own_rate), "settings", "param_groups[0]['lr']"
    ),
    "scheduler on one rank": Case(
        on_last_rank(extra_scheduler_step), "settings", "param_groups[0]['lr']"
    ),
    "step on one rank": Case(on_last_rank(extra_step), "updates", "first.weight"),
    "gradients not averaged": Case(
        everywhere(past_the_model), "gradients", "first.weight"
    ),
    "gradients not averaged, sgd": Case(
        everywhere(past_the_model), "gradients", "first.weight", (("sgd", True),)
    ),
    "buffer": Case(
        everywhere(write_buffer),
        "buffers",
        "seen",
        (("buffers", False),),
    ),
}


@ranks(2, exhaustive=(3,))
@pytest.mark.parametrize("name", CASES)
def test_the_report_names_cause_tensor_ranks_and_update(
    ctx: ProcessContext, name: str
) -> None:
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
    assert last in error.ranks
    assert 0 not in error.ranks
    messages = ctx.world.all_gather_object(str(error))
    assert len(set(messages)) == 1, "every rank stops with the same words"


@ranks(2)
def test_running_statistics_of_each_rank_are_left_in_peace(ctx: ProcessContext) -> None:
    start(buffers=False).train(nothing)


@ranks(2)
def test_report_goes_on_and_tells_once(ctx: ProcessContext) -> None:
    run = start(trust={"divergence": "report"})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run.train(on_last_rank(edit_weight), steps=24)
    words = [
        str(caught_warning.message)
        for caught_warning in caught
        if issubclass(caught_warning.category, HastenWarning)
    ]
    assert len(words) == (1 if ctx.is_main else 0)
    assert all("'last.weight', seen at update 8" in text for text in words)
    assert run.accelerator._clock.num_updates == 24


@ranks(2)
def test_off_and_ignored_names(ctx: ProcessContext) -> None:
    start(trust={"divergence": "off"}).train(on_last_rank(edit_weight))
    start(trust={"divergence_ignore": ["last.*"]}).train(on_last_rank(edit_weight))


# -- other ways of spreading ----------------------------------------------------------------------------------------
def language_run(
    sizes: dict[str, Any],
    strategy: str,
    spoil: Callable[[nn.Module], None],
    **settings: Any,
) -> Tensor:
    """Train a small language model and return this rank's part of a layer; a case may spoil it after six updates."""
    config = ParallelismConfig(**sizes)
    accelerator = Accelerator(
        parallelism_config=config,
        strategy=strategy,
        trust={"divergence_every": EVERY},
        **settings,
    )
    net = seeded(lambda: TinyLM(vocab=16, width=8, heads=4, depth=2, context=6))
    model, optimizer = accelerator.prepare(
        net, torch.optim.AdamW(net.parameters(), lr=1e-2, foreach=True)
    )
    g = torch.Generator().manual_seed(1)
    for step in range(14):
        batch = torch.randint(0, 16, (4, 6), generator=g)
        accelerator.backward(next_token_loss(model(batch), batch))
        optimizer.step()
        optimizer.zero_grad()
        if step + 1 == BAD_AT:
            with torch.no_grad():
                spoil(accelerator.unwrap_model(model))
    accelerator.end_training()
    return part(accelerator.unwrap_model(model)).detach().clone()


def keep(net: nn.Module) -> None:
    return None


def edit_a_whole_one(net: nn.Module) -> None:
    if torch.distributed.get_rank() == torch.distributed.get_world_size() - 1:
        next(p for name, p in net.named_parameters() if "norm" in name).data += 1e-3


def part(net: nn.Module) -> Tensor:
    """This rank's part of a layer that is divided by every strategy."""
    local: Tensor = net.get_parameter("blocks.0.up.weight").to_local()  # type: ignore[attr-defined]  # a DTensor
    return local


def edit_a_part(net: nn.Module) -> None:
    if torch.distributed.get_rank() == torch.distributed.get_world_size() - 1:
        part(net)[0] += 1e-3


def edit_own_part(net: nn.Module) -> None:
    """Every rank edits the part it alone holds: nobody else has a copy that could differ."""
    part(net)[0] += torch.distributed.get_rank()


@ranks(2)
def test_ranks_of_a_tensor_parallel_group_compare_what_is_whole(
    ctx: ProcessContext,
) -> None:
    language_run({"tp_size": 2}, "auto", keep)
    with pytest.raises(
        DivergenceError,
        match="tensor parallelism: ranks of a group read different batches",
    ) as caught:
        language_run({"tp_size": 2}, "auto", edit_a_whole_one)
    assert caught.value.cause == "gradients"


@ranks(2)
def test_shards_have_no_copy_to_differ_from(ctx: ProcessContext) -> None:
    unedited = language_run({}, "fsdp", keep)
    edited = language_run({}, "fsdp", edit_own_part)
    assert bool((edited[0] - unedited[0] > 0.5).all()) == (ctx.rank > 0), (
        "the edit must outlast the checks"
    )


@pytest.mark.exhaustive
@ranks(4)
def test_columns_of_hybrid_sharding_and_replicas_beside_tensor_parallel(
    ctx: ProcessContext,
) -> None:
    hybrid = {"dp_replicate_size": 2, "dp_shard_size": 2}
    for sizes, strategy in (
        (hybrid, "fsdp"),
        ({"tp_size": 2, "dp_replicate_size": 2}, "auto"),
    ):
        language_run(sizes, strategy, keep)
        with pytest.raises(DivergenceError) as caught:
            language_run(sizes, strategy, edit_a_part)
        divergence = caught.value
        assert (divergence.cause, divergence.name, divergence.ranks) == (
            "outside",
            "blocks.0.up.weight",
            (3,),
        ), str(divergence)
        assert "rank 1 and rank 3 differ from each other" in str(divergence)


# -- no false alarm -------------------------------------------------------------------------------------------------
def loop(
    accelerator: Accelerator, model: Any, optimizer: Any, loader: Any, epochs: int = 2
) -> None:
    for _ in range(epochs):
        for x, y in loader:
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.cross_entropy(model(x), y))
                optimizer.step()
                optimizer.zero_grad()


def data(rows: int = 40) -> TensorDataset:
    g = torch.Generator().manual_seed(3)
    return TensorDataset(
        torch.randn(rows, 6, generator=g), torch.randint(0, 3, (rows,), generator=g)
    )


@ranks(2)
def test_accumulation_resuming_and_scaled_losses_are_left_in_peace(
    ctx: ProcessContext, tmp_path: Path
) -> None:
    for precision in ("no", "fp16"):
        for attempt in range(2):
            accelerator = Accelerator(
                gradient_accumulation_steps=3,
                trust={"divergence_every": 1},
                mixed_precision=precision,
            )
            net = seeded(Net, 9 * attempt)
            prepared = accelerator.prepare(
                net,
                torch.optim.AdamW(net.parameters()),
                DataLoader(data(), batch_size=4, shuffle=True),
            )
            folder = str(tmp_path / precision)
            if attempt:
                accelerator.load_state(folder)
            loop(accelerator, *prepared)
            accelerator.save_state(folder)
            accelerator.end_training()


def two_models(spoils: bool) -> None:
    """A generator and its judge, each with an optimizer; the judge may be edited on rank 1."""
    accelerator = Accelerator(trust={"divergence_every": 1})
    makes, judges = nn.Linear(2, 6), nn.Linear(6, 1)
    maker_optimizer, judge_optimizer = (
        torch.optim.Adam(makes.parameters()),
        torch.optim.Adam(judges.parameters()),
    )
    maker, judge, maker_optimizer, judge_optimizer = accelerator.prepare(
        makes, judges, maker_optimizer, judge_optimizer
    )
    for step in range(12):
        fake = maker(torch.randn(4, 2))
        judge_optimizer.zero_grad()
        accelerator.backward((judge(fake.detach()) ** 2).mean())
        judge_optimizer.step()
        maker_optimizer.zero_grad()
        accelerator.backward(judge(fake).mean())
        maker_optimizer.step()
        if spoils and step == 5 and accelerator.process.is_last_process:
            judges.weight.data[0, 0] += 1
    accelerator.end_training()


@ranks(2)
def test_two_models_are_left_in_peace_and_the_second_is_named(
    ctx: ProcessContext,
) -> None:
    two_models(spoils=False)
    with pytest.raises(DivergenceError) as caught:
        two_models(spoils=True)
    assert caught.value.name == "model[1].weight"


@ranks(2)
def test_ranks_that_train_apart_on_purpose_are_left_in_peace(
    ctx: ProcessContext,
) -> None:
    accelerator = Accelerator(trust={"divergence_every": 1})
    net = seeded(Net)
    model, optimizer, loader = accelerator.prepare(
        net, torch.optim.SGD(net.parameters(), lr=0.1), DataLoader(data(), batch_size=4)
    )
    with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=3) as local:
        for x, y in loader:
            accelerator.backward(nn.functional.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
            local.step()
    accelerator.end_training()


@ranks(2)
def test_uneven_inputs_and_rank_local_parameters_are_left_in_peace(
    ctx: ProcessContext,
) -> None:
    accelerator = Accelerator(trust={"divergence_every": 1})
    net = nn.Sequential(
        seeded(lambda: nn.Linear(6, 8)), seeded(lambda: nn.Linear(8, 3))
    )
    net._ddp_params_and_buffers_to_ignore = ["1.bias"]  # type: ignore[assignment]  # how torch is told
    torch.manual_seed(ctx.rank)
    nn.init.normal_(net[1].bias)  # type: ignore[arg-type]  # a module's attribute
    model, optimizer = accelerator.prepare(
        net, torch.optim.SGD(net.parameters(), lr=0.1)
    )
    with accelerator.join_uneven_inputs([model]):
        for x, y in [data(8)[:]] * (3 + ctx.rank):
            accelerator.backward(nn.functional.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
    for x, y in [data(8)[:]] * 12:
        accelerator.backward(nn.functional.cross_entropy(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
    accelerator.end_training()
