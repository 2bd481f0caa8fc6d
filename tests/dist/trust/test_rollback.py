"""A run that goes back equals, bit for bit, one that is resumed from that checkpoint and whose loop leaves the bad batches out."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from hasten import Accelerator, Trainer, TrainerCallback, TrainingArguments
from hasten.errors import HastenWarning, NumbersError
from hasten.runtime.context import ProcessContext
from hasten.testing.pool import ranks
from hasten.testing.toys import seeded

ROWS, BATCH = 48, 2
BAD = (36, 41)
"""Late in every order below, once in the last batch of an epoch."""


class Rows(Dataset[dict[str, Any]]):
    """Rows by index; some are nan."""

    def __init__(self, bad: tuple[int, ...] = BAD) -> None:
        g = torch.Generator().manual_seed(1)
        self.x = torch.rand(ROWS, 4, generator=g)
        self.x[list(bad)] = math.nan

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": self.x[index], "index": index}


class Stream(IterableDataset[dict[str, Any]]):
    """The same rows in order."""

    def __init__(self) -> None:
        self.rows = Rows()

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self.rows[index] for index in range(ROWS))


class Net(nn.Module):
    """Normalises, drops and returns its loss, so that buffers and random numbers matter."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 1)
        )

    def forward(self, x: Tensor, index: Tensor | None = None) -> dict[str, Tensor]:
        return {"loss": (self.body(x) ** 2).mean()}


class Parts(NamedTuple):
    accelerator: Accelerator
    net: nn.Module
    model: Any
    optimizer: Any
    scheduler: Any
    loader: Any


def prepared(
    folder: Path, data: Callable[[], Any], every: int, **settings: Any
) -> Parts:
    trust = {"divergence_every": 3} | settings.pop("trust", {})
    accelerator = Accelerator(
        project_dir=str(folder),
        gradient_accumulation_steps=every,
        trust=trust,
        **settings,
    )
    torch.manual_seed(5)
    net = seeded(Net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    dataset = data()
    loader = DataLoader(
        dataset, batch_size=BATCH, shuffle=not isinstance(dataset, IterableDataset)
    )
    return Parts(
        accelerator, net, *accelerator.prepare(net, optimizer, scheduler, loader)
    )


def step(parts: Parts, batch: Any) -> None:
    with parts.accelerator.accumulate(parts.model):
        parts.accelerator.backward(parts.model(batch["x"])["loss"])
        parts.optimizer.step()
        parts.scheduler.step()
        parts.optimizer.zero_grad()


def run(parts: Parts) -> None:
    for batch in parts.loader:
        step(parts, batch)


def state(parts: Parts) -> dict[str, Any]:
    return {
        **{name: value.clone() for name, value in parts.net.state_dict().items()},
        **{
            f"{number}.{key}": value
            for number, one in enumerate(parts.optimizer.optimizer.state.values())
            for key, value in one.items()
        },
        "rate": torch.tensor(parts.scheduler.get_last_lr()),
        "updates": torch.tensor(parts.optimizer.num_updates),
        "random": torch.get_rng_state(),
    }


@contextmanager
def told() -> Iterator[list[str]]:
    found: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield found
    found += [
        str(one.message) for one in caught if issubclass(one.category, HastenWarning)
    ]


def bad_windows(
    ctx: ProcessContext, batches: list[list[int]], every: int, per_epoch: int
) -> list[int]:
    """The numbers of the batches whose update contains a bad row on any rank."""
    own = [number for number, batch in enumerate(batches) if set(batch) & set(BAD)]
    hit = {
        (number // per_epoch, number % per_epoch // every)
        for one in ctx.world.all_gather_object(own)
        for number in one
    }
    return [
        n
        for n in range(len(batches))
        if (n // per_epoch, n % per_epoch // every) in hit
    ]


@ranks(2, exhaustive=(1,))
@pytest.mark.parametrize(
    ("every", "save_at", "epochs", "data"),
    [(1, 1, 1, Rows), (2, 3, 1, Rows), (1, 5, 2, Rows), (1, 1, 1, Stream)],
    ids=["plain", "inside a window", "an epoch back", "stream"],
)
def test_going_back_is_resuming_without_the_bad_batches(
    ctx: ProcessContext,
    tmp_path: Path,
    every: int,
    save_at: int,
    epochs: int,
    data: Callable[[], Any],
) -> None:
    parts = prepared(tmp_path / "a", data, every, trust={"numbers": "rollback"})
    per_epoch = ROWS // (BATCH * ctx.world.size)
    given: list[list[int]] = []
    saved = ""
    with told() as messages:
        for _ in range(epochs):
            for batch in parts.loader:
                given.append(batch["index"].tolist())
                step(parts, batch)
                if len(given) == save_at:
                    saved = parts.accelerator.save_state()
    mine = state(parts)

    other = prepared(tmp_path / "b", data, every, trust={"numbers": "off"})
    order: list[list[int]] = []
    for _ in range(epochs):
        order += [batch["index"].tolist() for batch in other.loader]
    skipped = bad_windows(ctx, order, every, per_epoch)
    other.accelerator.load_state(saved)
    # a checkpoint is the beginning of a window
    number, expected = save_at // every * every, []
    while number < len(order):
        for batch in other.loader:
            if number not in skipped:
                expected.append(batch["index"].tolist())
                step(other, batch)
            number += 1
    times = len({number // every for number in skipped})
    assert times == len(messages) if ctx.is_main else not messages
    assert given[-len(expected) :] == expected
    theirs = state(other)
    assert all(torch.equal(value, theirs[name]) for name, value in mine.items())
    assert all(bool(torch.isfinite(value).all()) for value in mine.values())


@ranks(1, 2)
def test_what_was_left_out_stays_out_after_a_resume(
    ctx: ProcessContext, tmp_path: Path
) -> None:
    parts = prepared(tmp_path, Rows, 1, trust={"numbers": "rollback"})
    parts.accelerator.save_state()
    saved = ""
    with told():
        for batch in parts.loader:
            step(parts, batch)
            if parts.accelerator.optimizer_step_was_skipped:
                bad = len(saved)
            if parts.loader.parts.iteration.left_out and not saved:
                saved = parts.accelerator.save_state()
    assert bad
    resumed = prepared(tmp_path, Rows, 1, trust={"numbers": "off"})
    resumed.accelerator.load_state(saved)
    given = [set(batch["index"].tolist()) & set(BAD) for batch in resumed.loader]
    found = [
        row
        for one in ctx.world.all_gather_object([sorted(one) for one in given])
        for rows in one
        for row in rows
    ]
    # the row that was met before the save is left out, the other one comes
    assert len(found) == 1


@ranks(1, 2)
def test_without_a_checkpoint_or_too_often_every_rank_stops(
    ctx: ProcessContext, tmp_path: Path
) -> None:
    parts = prepared(tmp_path, Rows, 1, trust={"numbers": "rollback"})
    with pytest.raises(
        NumbersError,
        match=r"neither saved nor loaded a checkpoint to roll back to; call save_state\(\)",
    ):
        run(parts)
    parts = prepared(
        tmp_path, Rows, 1, trust={"numbers": "rollback", "numbers_rollbacks": 1}
    )
    parts.accelerator.save_state()
    with (
        told() as messages,
        pytest.raises(
            NumbersError,
            match=r"already rolled back 1 times \(trust.numbers_rollbacks=1\)",
        ),
    ):
        run(parts)
    assert len(messages) == ctx.is_main
    parts = prepared(tmp_path, Rows, 1, trust={"numbers": "rollback"})
    parts.accelerator.save_state()
    with pytest.raises(NumbersError, match="needs batches from a prepared loader"):
        step(parts, {"x": torch.full((2, 4), math.nan)})


@ranks(1, 2)
def test_nothing_spoiled_is_saved_and_the_end_is_told(
    ctx: ProcessContext, tmp_path: Path
) -> None:
    parts = prepared(tmp_path, Rows, 1, trust={"numbers": "rollback"})
    saved = parts.accelerator.save_state()
    with told() as messages:
        for batch in parts.loader:
            step(parts, batch)
            if parts.accelerator._rolling_back:
                assert parts.accelerator.save_state() == saved
                break
        parts.accelerator.end_training()
    assert len(messages) == (3 if ctx.is_main else 0)
    if ctx.is_main:
        assert "saved nothing" in messages[1]
        assert "ended before it was rolled back" in messages[2]


class SaveAt(TrainerCallback):
    """Saves once, and makes a training leave out given batches."""

    def __init__(self) -> None:
        self.left_out: set[Any] = set()

    def on_train_begin(
        self, args: Any, state: Any, control: Any, **kwargs: Any
    ) -> None:
        kwargs["train_dataloader"].leave_out(self.left_out)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_save = state.global_step == 2


@ranks(2, exhaustive=(1,))
def test_a_trainer_goes_back(ctx: ProcessContext, tmp_path: Path) -> None:
    """It ends as one that is resumed from that checkpoint with these batches left out, its log included."""

    def trainer(numbers: str, name: str, callback: SaveAt) -> Trainer:
        arguments = TrainingArguments(
            str(tmp_path / name),
            per_device_train_batch_size=BATCH,
            num_train_epochs=2,
            save_strategy="no",
            logging_steps=1,
            disable_tqdm=True,
        )
        with pytest.MonkeyPatch.context() as variables:
            variables.setenv("HASTEN_TRUST_NUMBERS", numbers)
            return Trainer(
                seeded(Net), arguments, train_dataset=Rows(), callbacks=[callback]
            )

    leaving = SaveAt()
    first, second = trainer("rollback", "a", SaveAt()), trainer("off", "b", leaving)
    with told() as messages:
        first.train()
    left_out = first.train_loader.parts.iteration.left_out
    assert len(messages) == (len(left_out) if ctx.is_main else 0)
    assert len(left_out) >= 2
    leaving.left_out = left_out
    second.train(resume_from_checkpoint=first.accelerator._saving.newest())
    mine, theirs = first.model.state_dict(), second.model.state_dict()
    assert all(torch.equal(value, theirs[name]) for name, value in mine.items())
    assert all(bool(torch.isfinite(value).all()) for value in mine.values())
    logs = [
        [one.get("loss") for one in made.state.log_history] for made in (first, second)
    ]
    assert logs[0] == logs[1]
    assert first.state.global_step == second.state.global_step == first.state.max_steps
