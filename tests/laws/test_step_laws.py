"""Random training runs against one plain torch process with the big batch, and interrupted ones against uninterrupted ones.

Without mixed precision most cases run in float64, where another order of sums shows below 1e-8 and a wrong factor, a lost
micro-step or a missed update does not. The others agree with the float64 reference as far as their arithmetic goes, see
`TOLERANCES`. A resume on as many processes is compared bit for bit in every precision.

`make laws` searches for long, `make laws SEED=17` runs one case, which is printed with its seed when it fails.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LinearLR, ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader, TensorDataset

from hasten import Accelerator, DataLoaderConfiguration
from hasten.config.sections.loop import GradScalerKwargs
from hasten.config.sections.parallel import ParallelismConfig
from hasten.errors import CheckpointError, HastenWarning
from hasten.runtime.context import ProcessContext
from hasten.testing.pool import Pool
from hasten.testing.toys import TinyLM, seeded
from tests.support.laws import Law

# Any in this file: settings of many kinds, and what `prepare` returns.
TENSOR_KINDS: Final = ("lm", "tied", "scalar")
KINDS: Final = (*TENSOR_KINDS, "perceptron", "dropout")
OPTIMIZERS: Final[dict[str, Callable[[Any], Optimizer]]] = {
    "momentum": lambda params: torch.optim.SGD(
        params, lr=0.1, momentum=0.9, weight_decay=0.01
    ),
    "nesterov": lambda params: torch.optim.SGD(
        params, lr=0.1, momentum=0.8, nesterov=True
    ),
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-2),
    "amsgrad": lambda params: torch.optim.Adam(params, lr=1e-2, amsgrad=True),
    "nadam": lambda params: torch.optim.NAdam(params, lr=1e-2),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.05, eps=1e-6),
    "rmsprop": lambda params: torch.optim.RMSprop(
        params, lr=1e-2, momentum=0.5, eps=1e-4
    ),
}
PLAN: Final = {
    "*embed": "embedding_rowwise",
    "*blocks.*.[qkv]": "colwise",
    "*blocks.*.o": "rowwise",
    "*blocks.*.up": "colwise",
    "*blocks.*.down": "rowwise",
    "*head": "colwise_gather_output",
}
LAYOUTS: Final = (
    ("one", 1),
    *(("ddp", world) for world in (2, 3, 4)),
    *(("fsdp", world) for world in (1, 2, 3, 4)),
    ("hsdp", 4),
    *(("tp", world) for world in (2, 4)),
    *((strategy, 4) for strategy in ("tp+ddp", "tp+fsdp")),
)
REPLICAS: Final = ("hsdp", "tp+ddp")
"""Sharded with copies: the gradients of an open window are reduced in part, and fit no other layout."""
TOLERANCES: Final = {"float64": 1e-8, "no": 1e-4, "bf16": 0.15, "fp16": 0.03}
"""On losses of about 1 to 2. float32 keeps 24 bits of a sum, fp16 11 and bf16 8 of every product, over up to 40 updates."""
ADAPTIVE: Final = ("adamw", "amsgrad", "nadam", "adagrad", "rmsprop")
"""They divide by a gradient's size: one that is zero but for rounding (a key's bias) moves weights that change no loss."""
CLASSES: Final = 3
VOCAB: Final = 8
CONTEXT: Final = 4
PATIENCE_S: Final = 300.0


@dataclass(frozen=True)
class Case:
    """One way to train, stop and go on."""

    kind: str
    layout: tuple[str, int]
    new_layout: tuple[str, int]
    precision: str
    """`float64` and `no` train without mixed precision, in float64 and float32."""
    every: int
    weighted: bool
    clip: str
    owned: str
    """The parameters the optimizer holds: all, or a part of them, while clipping sees all."""
    optimizer: str
    schedule: str
    size: int
    batch: int
    mode: str
    shuffle: bool
    epochs: int
    stop: float
    """The part of the run after which it is saved."""
    background: bool
    """Whether it is saved while training goes on."""
    seed: int


def draw(seed: int) -> Case:
    """The case of a seed."""
    r = random.Random(seed)
    kind = r.choice(KINDS)
    layouts = [
        layout for layout in LAYOUTS if kind in TENSOR_KINDS or "tp" not in layout[0]
    ]
    layout = r.choice(layouts)
    mode = r.choice(("shard", "shard", "split"))
    return Case(
        kind=kind,
        layout=layout,
        new_layout=layout
        if kind == "dropout" or r.random() < 0.5
        else r.choice(layouts),
        precision=r.choice(("float64", "float64", "float64", "no", "bf16", "fp16")),
        every=r.randint(1, 4),
        weighted=r.random() < 0.5,
        clip=r.choice(("off", "norm", "value")),
        optimizer=r.choice(list(OPTIMIZERS)),
        schedule=r.choice(("none", "update", "epoch", "plateau")),
        size=r.randint(1, 30),
        # 12 divides over 1 to 4 processes
        batch=12 if mode == "split" else r.choice((1, 2, 3)),
        mode=mode,
        shuffle=r.random() < 0.5,
        epochs=r.choice((1, 2, 3)),
        stop=r.random(),
        background=r.random() < 0.4,
        # drawn last: seeds keep their other choices
        owned=r.choice(("all", "all", "half", "odd")),
        seed=seed,
    )


# -- what is trained --------------------------------------------------------------------------------------------------
class Tempered(nn.Module):
    """A language model with a learned temperature: a parameter without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.net = TinyLM(vocab=VOCAB, width=8, heads=4, depth=1, context=CONTEXT)
        self.temperature = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) * self.temperature  # type: ignore[no-any-return]


def model(case: Case) -> nn.Module:
    if case.kind == "scalar":
        net: nn.Module = seeded(Tempered, case.seed)
    elif case.kind in TENSOR_KINDS:
        tied = case.kind == "tied"
        net = seeded(
            lambda: TinyLM(
                vocab=VOCAB, width=8, heads=4, depth=1, context=CONTEXT, tied=tied
            ),
            case.seed,
        )
    else:  # 7 and 3 rows: uneven and empty shards
        rate = 0.4 if case.kind == "dropout" else 0.0
        net = seeded(
            lambda: nn.Sequential(
                nn.Linear(5, 7), nn.Tanh(), nn.Dropout(rate), nn.Linear(7, CLASSES)
            ),
            case.seed,
        )
    return net


@dataclass(frozen=True)
class Data:
    """All samples of a case: inputs, labels, and what each weighs in a weighted loss."""

    x: Tensor
    y: Tensor
    weight: Tensor

    def losses(self, net: nn.Module, ids: Tensor) -> Tensor:
        """The loss of each of these samples."""
        x, y = self.x[ids], self.y[ids]
        logits = net(x)
        if logits.dim() == 2:
            return F.cross_entropy(logits, y, reduction="none")
        return (
            F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="none")
            .view(y.shape)
            .mean(1)
        )


def data(case: Case, dtype: torch.dtype) -> Data:
    g = torch.Generator().manual_seed(case.seed)
    if case.kind in TENSOR_KINDS:
        tokens = torch.randint(0, VOCAB, (case.size, CONTEXT + 1), generator=g)
        x, y = tokens[:, :-1], tokens[:, 1:]
    else:
        x = torch.randn(case.size, 5, generator=g, dtype=torch.float64).to(dtype)
        y = torch.randint(0, CLASSES, (case.size,), generator=g)
    return Data(x, y, torch.randint(1, 6, (case.size,), generator=g).to(dtype))


def owned(case: Case, net: nn.Module) -> list[nn.Parameter]:
    """The parameters the optimizer holds; those of the others stay as they are."""
    every = list(net.parameters())
    return {"all": every, "half": every[len(every) // 2 :], "odd": every[1::2]}[
        case.owned
    ]


def updated_by(optimizer: Optimizer) -> list[nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def schedule(case: Case, optimizer: Optimizer) -> Any:
    if case.schedule == "update":
        return LinearLR(optimizer, 1.0, 0.1, total_iters=8)
    if case.schedule == "epoch":
        return StepLR(optimizer, 1, gamma=0.5)
    return (
        ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
        if case.schedule == "plateau"
        else None
    )


def end_epoch(case: Case, scheduler: Any) -> None:
    if case.schedule == "epoch":
        scheduler.step()
    elif case.schedule == "plateau":
        # a metric that all processes share and that never gets better
        scheduler.step(1.0)


def clip(case: Case, with_norm: Any, with_value: Any, parameters: Any) -> None:
    if case.clip == "norm":
        with_norm(parameters, 0.1)
    elif case.clip == "value":
        with_value(parameters, 0.01)


# -- runs -------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Micro:
    """A micro-step as one rank saw it."""

    epoch: int
    ids: tuple[int, ...]
    real: int
    weight: float
    loss: float
    update: bool
    last: bool
    rate: float
    skipped: bool


@dataclass(frozen=True)
class Run:
    """What one rank did, and what it holds at the end."""

    micros: list[Micro]
    saved: int
    """After how many of them it was saved."""
    weights: dict[str, Tensor]
    """Whole, by name."""
    rank_state: dict[str, Tensor | float | str]
    """Everything of this rank that must come back bit for bit."""
    refused: str = ""


def settings(layout: tuple[str, int]) -> dict[str, Any]:
    strategy, world = layout
    sizes: dict[str, dict[str, Any]] = {
        "hsdp": {"dp_replicate_size": 2, "dp_shard_size": 2},
        "tp": {"tp_size": world},
        "tp+ddp": {"tp_size": 2, "dp_replicate_size": 2},
        "tp+fsdp": {"tp_size": 2, "dp_shard_size": 2},
    }
    if "tp" in strategy:
        return {
            "parallelism_config": ParallelismConfig(**sizes[strategy], tp_plan=PLAN)
        }
    if strategy == "hsdp":
        return {
            "strategy": "fsdp",
            "parallelism_config": ParallelismConfig(**sizes[strategy]),
        }
    return {"strategy": "fsdp"} if strategy == "fsdp" else {}


def run(
    ctx: ProcessContext,
    case: Case,
    layout: tuple[str, int],
    folder: Path | None,
    resume: bool,
) -> Run:
    """All epochs, saved on the way if there is a folder, or what comes after the save; or why that was refused."""
    torch.manual_seed(999 if resume else 100 + ctx.rank)
    accelerator = Accelerator(
        gradient_accumulation_steps=case.every,
        mixed_precision="no" if case.precision == "float64" else case.precision,
        dataloader_config=DataLoaderConfiguration(
            split_batches=case.mode == "split", data_seed=31
        ),
        kwargs_handlers=[GradScalerKwargs(init_scale=2.0**6, growth_interval=2)],
        **settings(layout),
    )
    dtype = torch.float64 if case.precision == "float64" else torch.float32
    samples, net = data(case, dtype), model(case).to(dtype)
    optimizer = OPTIMIZERS[case.optimizer](owned(case, net))
    scheduler = schedule(case, optimizer)
    loader = DataLoader(
        TensorDataset(torch.arange(case.size)),
        batch_size=case.batch,
        shuffle=case.shuffle,
    )
    net, optimizer, loader = accelerator.prepare(net, optimizer, loader)
    if scheduler is not None:
        with warnings.catch_warnings():
            # a length is drawn, not meant
            warnings.filterwarnings("ignore", ".* was made for", HastenWarning)
            scheduler = accelerator.prepare(scheduler)
    trainer = Trainer(case, accelerator, net, optimizer, scheduler, loader, samples)
    if resume:
        assert folder is not None
        try:
            accelerator.load_state(folder)
        except CheckpointError as error:
            return Run([], 0, {}, {}, str(error))
        trainer.train(None, 0)
    else:
        steps = len(loader) * case.epochs
        trainer.train(folder, min(int(case.stop * steps) + 1, steps))
        assert len(trainer.micros) == steps, (
            "the loader gave another length than it has"
        )
    accelerator.wait_for_saves()
    done = Run(trainer.micros, trainer.saved, *trainer.state())
    accelerator.free_memory()
    return done


class Trainer:
    """The loop a user writes, which saves after so many micro-steps."""

    def __init__(
        self,
        case: Case,
        accelerator: Accelerator,
        net: Any,
        optimizer: Any,
        scheduler: Any,
        loader: Any,
        samples: Data,
    ) -> None:
        self.case, self.accelerator, self.net, self.optimizer = (
            case,
            accelerator,
            net,
            optimizer,
        )
        self.scheduler, self.loader, self.samples = scheduler, loader, samples
        self.micros: list[Micro] = []
        self.saved = 0

    def train(self, folder: Path | None, stop: int) -> None:
        """Save after `stop` micro-steps if there is a folder, and go on."""
        odd = (
            self.case.seed % 2 == 1
            # odd ones are saved with an epoch's last batch in hand, even ones after the epoch
        )
        while self.loader.epoch < self.case.epochs:
            for (ids,) in self.loader:
                self.micro_step(ids)
                if len(self.micros) == stop and (odd or not self.loader.cursor.at_end):
                    self.save(folder)
            end_epoch(self.case, self.scheduler)
            if len(self.micros) == stop and not self.saved:
                self.save(folder)

    def save(self, folder: Path | None) -> None:
        self.saved = len(self.micros)
        if folder is not None:
            self.accelerator.save_state(folder, blocking=not self.case.background)

    def micro_step(self, ids: Tensor) -> None:
        case, accelerator, cursor = self.case, self.accelerator, self.loader.cursor
        real = len(ids) if cursor.num_real is None else cursor.num_real
        rate = self.optimizer.param_groups[0]["lr"]
        with accelerator.accumulate(self.net):
            losses = self.samples.losses(self.net, ids)
            # padding counts nothing
            weight = self.samples.weight[ids] * (torch.arange(len(ids)) < real)
            total = weight.sum()
            if case.weighted:
                loss = (losses * weight).sum() / total
                accelerator.backward(loss, weight=total)
            else:
                loss = losses.mean()
                accelerator.backward(loss)
            update = accelerator.sync_gradients
            if update:
                clip(
                    case,
                    accelerator.clip_grad_norm_,
                    accelerator.clip_grad_value_,
                    updated_by(self.optimizer),
                )
            self.optimizer.step()
            if case.schedule == "update":
                self.scheduler.step()
            self.optimizer.zero_grad()
        skipped = update and accelerator.optimizer_step_was_skipped
        number = 0.0 if case.weighted and not total else float(loss.detach())
        row = (
            tuple(ids.tolist()),
            real,
            float(total),
            number,
            update,
            cursor.at_end,
            rate,
            skipped,
        )
        self.micros.append(Micro(self.loader.epoch, *row))

    def state(self) -> tuple[dict[str, Tensor], dict[str, Tensor | float | str]]:
        full_weights: dict[str, Tensor] = {}
        rank_state: dict[str, Tensor | float | str] = {
            "rate": self.optimizer.param_groups[0]["lr"]
        }
        rank_state["drawn"] = float(torch.rand(()))
        owned_ids = {
            id(parameter)
            for group in self.optimizer.param_groups
            for parameter in group["params"]
        }
        for name, parameter in self.accelerator.unwrap_model(
            self.net
        ).named_parameters():
            entries = {
                "weight": parameter.detach(),
                **self.optimizer.state.get(parameter, {}),
            }
            # a checkpoint holds no gradients: those without an optimizer begin anew
            if parameter.grad is not None and id(parameter) in owned_ids:
                entries["gradient"] = parameter.grad
            for key, value in entries.items():
                local_value = value.to_local() if isinstance(value, DTensor) else value
                rank_state[f"{name}/{key}"] = (
                    local_value.detach().clone()
                    if isinstance(local_value, Tensor)
                    else local_value
                )
            value = parameter.detach()
            full_weights[name] = (
                value.full_tensor() if isinstance(value, DTensor) else value
            ).clone()
        if self.scheduler is not None:
            rank_state["scheduler"] = repr(
                sorted(self.scheduler.state_dict().items(), key=str)
            )
        return full_weights, rank_state


def runs(
    ctx: ProcessContext, case: Case, folder: Path
) -> tuple[Run, Run | None, Run | None]:
    """The run that is saved on the way, a few times one that is not, and, on the same layout, the one that goes on."""
    first_run = run(ctx, case, case.layout, folder, False)
    undisturbed = (
        run(ctx, case, case.layout, None, False) if case.seed % 5 == 0 else None
    )
    resumed_run = (
        run(ctx, case, case.layout, folder, True)
        if case.new_layout == case.layout
        else None
    )
    return first_run, undisturbed, resumed_run


# -- the law ----------------------------------------------------------------------------------------------------------
def reference(
    case: Case, steps: Sequence[Sequence[Micro]]
) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Losses and learning rates of every update, and the weights at the end, of one process in plain torch.

    `steps` has the micro-steps of all ranks, one list a step; each window of them is one batch here.
    """
    samples, net = data(case, torch.float64), model(case).double()
    optimizer = OPTIMIZERS[case.optimizer](owned(case, net))
    scheduler = schedule(case, optimizer)
    losses: list[float] = []
    rates: list[float] = []
    for window in windows(steps):
        ids = torch.tensor(
            [sample_id for step in window for micro in step for sample_id in micro.ids]
        )
        share = torch.cat(
            [
                shares(case, samples, micro, len(window) * len(step))
                for step in window
                for micro in step
            ]
        )
        if case.weighted:
            share = share / share.sum()
        optimizer.zero_grad()
        loss = (samples.losses(net, ids) * share).sum()
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        clip(
            case,
            nn.utils.clip_grad_norm_,
            nn.utils.clip_grad_value_,
            updated_by(optimizer),
        )
        losses.append(float(loss.detach()))
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        if case.schedule == "update":
            scheduler.step()
        if window[-1][0].last:
            end_epoch(case, scheduler)
    rates.append(optimizer.param_groups[0]["lr"])
    return (
        losses,
        rates,
        {name: value.detach() for name, value in net.named_parameters()},
    )


def shares(case: Case, samples: Data, micro: Micro, num_parts: int) -> Tensor:
    """What each sample of a micro-step counts for: its weight, or its part of a mean of equal means."""
    if case.weighted:
        return samples.weight[list(micro.ids)] * (
            torch.arange(len(micro.ids)) < micro.real
        )
    return torch.full(
        (len(micro.ids),), 1.0 / (len(micro.ids) * num_parts), dtype=torch.float64
    )


def windows(steps: Sequence[Sequence[Micro]]) -> list[list[Sequence[Micro]]]:
    grouped: list[list[Sequence[Micro]]] = [[]]
    for step in steps:
        grouped[-1].append(step)
        if step[0].update:
            grouped.append([])
    assert not grouped.pop(), "the last window is open"
    return grouped


def window_loss(case: Case, window: Sequence[Sequence[Micro]]) -> float:
    micros = [micro for step in window for micro in step]
    if case.weighted:
        return sum(micro.loss * micro.weight for micro in micros) / sum(
            micro.weight for micro in micros
        )
    return sum(sum(micro.loss for micro in step) / len(step) for step in window) / len(
        window
    )


def compare_with_torch(case: Case, steps: Sequence[Sequence[Micro]], end: Run) -> None:
    """Each sample once, windows as set, and losses, learning rates and weights as in plain torch."""
    for epoch in range(case.epochs):
        used_ids = [
            i
            for step in steps
            for micro in step
            if micro.epoch == epoch
            for i in micro.ids[: micro.real]
        ]
        assert set(used_ids) == set(range(case.size)), (
            f"epoch {epoch} saw {sorted(used_ids)}"
        )
    for window in windows(steps):
        assert len(window) == case.every or (
            len(window) < case.every and window[-1][0].last
        ), "a window ends early"
        flags = {
            (micro.update, micro.last, micro.rate) for step in window for micro in step
        }
        assert len({(micro.update, micro.last) for micro in window[-1]}) == 1, (
            f"ranks disagree: {flags}"
        )
    if any(micro.skipped for step in steps for micro in step):
        return
    losses, rates, expected = reference(case, steps)
    actual_losses = [window_loss(case, window) for window in windows(steps)]
    tolerance = TOLERANCES[case.precision]
    for number, (a, b) in enumerate(zip(actual_losses, losses, strict=True)):
        assert math.isclose(a, b, rel_tol=tolerance, abs_tol=tolerance), (
            f"loss of update {number}: {a}, in torch {b}"
        )
    assert [
        *(window[-1][0].rate for window in windows(steps)),
        end.rank_state["rate"],
    ] == rates, "other learning rates"
    if case.precision == "float64" or (
        case.precision == "no" and case.optimizer not in ADAPTIVE
    ):
        assert end.weights.keys() == expected.keys()
        for name, value in end.weights.items():
            torch.testing.assert_close(
                value.double(),
                expected[name],
                rtol=0,
                atol=tolerance,
                msg=f"{name}: {{}}".format,
            )


def same(a: Any, b: Any) -> bool:
    return torch.equal(a, b) if isinstance(a, Tensor) else bool(a == b)


def compare_bitwise(uninterrupted: Run, resumed: Run, stop: int) -> None:
    """A run from some micro-step on against the whole one."""
    assert resumed.micros == uninterrupted.micros[stop:], (
        f"after {stop} steps:\n{resumed.micros}\ninstead of\n{uninterrupted.micros[stop:]}"
    )
    assert resumed.rank_state.keys() == uninterrupted.rank_state.keys()
    different = [
        name
        for name, value in resumed.rank_state.items()
        if not same(value, uninterrupted.rank_state[name])
    ]
    assert not different, (
        f"it ends with another {different}: {[(resumed.rank_state[n], uninterrupted.rank_state[n]) for n in different[:2]]}"
    )


def window_start(micros: Sequence[Micro], stop: int) -> int:
    """Return the beginning of the window in which a run was saved after `stop` micro-steps: a resume repeats from there."""
    return max(
        (number for number in range(1, stop + 1) if micros[number - 1].update),
        default=0,
    )


def check(case: Case, pool: Pool) -> str:
    """Compare with plain torch, and the interrupted run with the uninterrupted one."""
    with tempfile.TemporaryDirectory() as folder:
        done = pool.run(runs, case.layout[1], case, Path(folder), timeout_s=PATIENCE_S)
        first_runs, rests = (
            [outcome[0] for outcome in done],
            [outcome[2] for outcome in done if outcome[2] is not None],
        )
        start = window_start(first_runs[0].micros, first_runs[0].saved)
        for saved, undisturbed, _ in done:
            if undisturbed is not None:
                compare_bitwise(undisturbed, saved, 0)
        if case.kind != "dropout":
            compare_with_torch(case, together(case.layout, first_runs), first_runs[0])
        if not rests:
            args = (case, case.new_layout, Path(folder), True)
            rests = pool.run(run, case.new_layout[1], *args, timeout_s=PATIENCE_S)
    assert not any(resumed_run.refused for resumed_run in rests), (
        f"refused: {[resumed_run.refused for resumed_run in rests]}"
    )
    if case.new_layout == case.layout:
        for first_run, resumed in zip(first_runs, rests, strict=True):
            compare_bitwise(first_run, resumed, start)
        return "exact"
    steps = together(case.layout, first_runs, start) + together(case.new_layout, rests)
    compare_with_torch(case, steps, rests[0])
    return "as in torch on another layout"


def together(
    layout: tuple[str, int], ranks: Sequence[Run], stop: int | None = None
) -> list[tuple[Micro, ...]]:
    """The micro-steps of the ranks that read different samples, step after step; ranks of a tensor-parallel group read the same."""
    alike = {"tp": layout[1], "tp+ddp": 2, "tp+fsdp": 2}.get(layout[0], 1)
    return list(
        zip(*(rank_run.micros[:stop] for rank_run in ranks[::alike]), strict=True)
    )


def law(pool: Pool) -> Law[Case]:
    return Law(draw, lambda case: check(case, pool))


def test_a_seed_draws_one_case() -> None:
    assert draw(17) == draw(17)
    drawn = [draw(seed) for seed in range(500)]
    assert {case.kind for case in drawn} == set(KINDS), "every kind is drawn"
    assert {case.owned for case in drawn} == {"all", "half", "odd"}, (
        "every part of the parameters is drawn"
    )
    assert (
        {case.layout for case in drawn}
        == {case.new_layout for case in drawn}
        == set(LAYOUTS)
    ), "every layout is drawn"


@pytest.mark.parametrize(
    "seed", [10_122, pytest.param(10_220, marks=pytest.mark.exhaustive)]
)
def test_a_weighted_window_goes_on_with_other_ranks_reading_the_same(
    rank_pool: Pool, seed: int
) -> None:
    """Four ranks with samples of their own save, and two tensor-parallel pairs resume in the middle of the window."""
    assert check(draw(seed), rank_pool) == "as in torch on another layout"


def test_random_runs_train_as_in_torch_and_resume_exactly(rank_pool: Pool) -> None:
    tally = law(rank_pool).search(range(10_000), seconds=6)
    assert tally.verdicts["exact"], str(tally)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, help="run this case alone")
    parser.add_argument("--start", type=int, default=0, help="first seed")
    parser.add_argument("--cases", type=int, default=1000)
    args = parser.parse_args()
    seeds = (
        range(args.start, args.start + args.cases) if args.seed is None else [args.seed]
    )
    with Pool() as workers:
        tally = law(workers).search(seeds, tell=sys.stderr.write)
    sys.stdout.write(f"{tally}\n")
    sys.exit(bool(tally.broken))
