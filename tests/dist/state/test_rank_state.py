"""State of a rank's own comes back to that rank; state that all ranks share is stored once."""

from __future__ import annotations

import logging
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR

from hasten import Accelerator
from hasten.errors import CheckpointError
from hasten.runtime.context import ProcessContext
from hasten.state.rank_state import fingerprint_tensor
from hasten.testing.pool import Pool, ranks


class Thing:
    """Something with state."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


class Heard(logging.Handler):
    """Warnings of hasten, for the time of a block."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    def __enter__(self) -> Heard:
        logging.getLogger("hasten").addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger("hasten").removeHandler(self)


def make(
    ctx: ProcessContext, folder: Path, *things: Thing
) -> tuple[Accelerator, Any, Any, Any]:
    accelerator = Accelerator(context=ctx, project_dir=str(folder))
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    plateau, fixed = (
        ReduceLROnPlateau(optimizer, factor=0.5, patience=0),
        StepLR(optimizer, 100),
    )
    model, optimizer, plateau, _ = accelerator.prepare(model, optimizer, plateau, fixed)
    accelerator.register_for_checkpointing(*things)
    return accelerator, model, optimizer, plateau


def own(rank: int) -> list[Thing]:
    """Objects that differ between ranks in a number, a tensor or a structure, and one that does not."""
    tensor = torch.arange(5) + (rank == 1) * torch.tensor([0, 0, 0, 0, 1])
    return [Thing(10 + rank), Thing(torch.ones(3)), Thing(tensor), Thing([0] * rank)]


@ranks(1, 2, 3)
def test_each_rank_gets_its_own_back(ctx: ProcessContext, tmp_path: Path) -> None:
    things = own(ctx.rank)
    accelerator, *_ = make(ctx, tmp_path, *things)
    accelerator.save_state(str(tmp_path / "x"))
    fresh = [Thing(None) for _ in things]
    resumed, *_ = make(ctx, tmp_path, *fresh)
    resumed.load_state(str(tmp_path / "x"))
    for original, restored in zip(own(ctx.rank), fresh, strict=True):
        assert repr(original.value) == repr(restored.value)
    saved_files = sorted(
        path.name for path in (tmp_path / "x").glob("custom_checkpoint_*")
    )
    num_expected = {1: 4, 2: 3 * 2 + 1, 3: 3 * 3 + 1}[ctx.world.size]
    assert len(saved_files) == num_expected, (
        f"equal state is stored once: {saved_files}"
    )


@ranks(2, 3)
def test_schedulers_that_disagree_are_told_and_those_of_rank_0_are_saved(
    ctx: ProcessContext, tmp_path: Path
) -> None:
    accelerator, model, optimizer, plateau = make(ctx, tmp_path)
    for _ in range(3):
        accelerator.backward(model(torch.ones(1, 2)).sum())
        optimizer.step()
        plateau.step(float(ctx.rank))  # a metric of its own
        optimizer.zero_grad()
    if ctx.rank == 1:
        optimizer.param_groups[0]["lr"] = 0.125
        plateau.scheduler.best = -1.0
    with Heard() as heard:
        accelerator.save_state(str(tmp_path / "x"))
    disagreements = [
        line for line in heard.lines if "ranks disagree on scheduler" in line
    ]
    assert bool(disagreements) is (ctx.rank == 0), "logged once, by the main process"
    state = (optimizer.param_groups[0]["lr"], plateau.scheduler.state_dict())
    expected_state = ctx.world.all_gather_object(state)[0]
    resumed, _, optimizer, plateau = make(ctx, tmp_path)
    resumed.load_state(str(tmp_path / "x"))
    assert (
        optimizer.param_groups[0]["lr"],
        plateau.scheduler.state_dict(),
    ) == expected_state


@ranks(2)
def test_schedulers_that_agree_are_stored_once_in_silence(
    ctx: ProcessContext, tmp_path: Path
) -> None:
    accelerator, model, optimizer, plateau = make(ctx, tmp_path)
    accelerator.backward(model(torch.ones(1, 2)).sum())
    optimizer.step()
    plateau.step(1.0)
    with Heard() as heard:
        accelerator.save_state(str(tmp_path / "x"))
    assert not [line for line in heard.lines if "disagree" in line]
    assert (tmp_path / "x" / "scheduler.bin").exists()
    assert (tmp_path / "x" / "scheduler_1.bin").exists()


def save_own(ctx: ProcessContext, folder: Path, is_equal: bool) -> None:
    accelerator, *_ = make(ctx, folder, Thing(7 if is_equal else 10 + ctx.rank))
    accelerator.save_state(str(folder / "x"))


def load_own(ctx: ProcessContext, folder: Path, strict: bool) -> Any:
    restored = Thing(None)
    accelerator, *_ = make(ctx, folder, restored)
    accelerator.load_state(str(folder / "x"), strict=strict)
    return restored.value


def refused(ctx: ProcessContext, folder: Path) -> str:
    restored = Thing("before")
    accelerator, *_ = make(ctx, folder, restored)
    with pytest.raises(CheckpointError) as caught:
        accelerator.load_state(str(folder / "x"))
    assert restored.value == "before"
    return str(caught.value)


@pytest.mark.parametrize(("old", "new"), [(2, 1), (2, 3)])
def test_own_state_on_another_number_of_processes(
    rank_pool: Pool, tmp_path: Path, old: int, new: int
) -> None:
    rank_pool.run(save_own, old, tmp_path, False)
    messages = rank_pool.run(refused, new, tmp_path)
    assert len(set(messages)) == 1
    assert "Nothing was loaded" in messages[0]
    assert "strict=False" in messages[0]
    assert rank_pool.run(load_own, new, tmp_path, False) == [
        10 + rank % old for rank in range(new)
    ]
    rank_pool.run(save_own, old, tmp_path, True)
    assert rank_pool.run(load_own, new, tmp_path, True) == [7] * new


@ranks(2)
def test_a_bad_metric_on_one_rank_stops_both(
    ctx: ProcessContext, tmp_path: Path
) -> None:
    accelerator, *_ = make(ctx, tmp_path)
    bad: dict[str, Any] = {"loss": None if ctx.rank == 1 else 1.0}
    with pytest.raises(CheckpointError, match=r"rank 1.*NoneType"):
        accelerator.save_state(str(tmp_path / "x"), metrics=bad)
    assert not (tmp_path / "x").exists()
    accelerator.save_state(str(tmp_path / "x"), metrics={"loss": 1.0})


@ranks(2, 3)
def test_a_failing_object_after_exactly_one_step(
    ctx: ProcessContext, tmp_path: Path
) -> None:
    """The step after which DDP would rebuild its buckets, together, at the next forward or save."""

    class Failing(Thing):
        def state_dict(self) -> dict[str, Any]:
            if ctx.rank == 1:
                raise ValueError("this rank cannot")
            return {}

    accelerator, model, optimizer, _ = make(ctx, tmp_path, Failing(0))
    accelerator.backward(model(torch.ones(1, 2)).sum())
    optimizer.step()
    with pytest.raises(CheckpointError, match="this rank cannot"):
        accelerator.save_state(str(tmp_path / "x"))
    accelerator.backward(model(torch.ones(1, 2)).sum())  # and the run goes on


@ranks(2)
def test_ranks_that_ask_for_different_saves_are_told(
    ctx: ProcessContext, tmp_path: Path
) -> None:
    accelerator, *_ = make(ctx, tmp_path)
    with pytest.raises(Exception, match="different arguments"):
        accelerator.save_state(str(tmp_path / "x"), blocking=ctx.rank == 0)


def test_every_changed_bit_changes_the_fingerprint() -> None:
    rng = random.Random(4)
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool):
        for _ in range(40):
            size = rng.randrange(1, 40)
            raw = torch.randint(0, 2, (size,)).to(dtype)
            changed = raw.clone()
            position = rng.randrange(size)
            changed[position] = (
                1 - changed[position].to(torch.int32)
                if dtype is torch.bool
                else changed[position] + 1
            )
            assert fingerprint_tensor(raw) == fingerprint_tensor(raw.clone())
            assert fingerprint_tensor(raw) != fingerprint_tensor(changed)
            if size > 1 and not torch.equal(raw, raw.roll(1)):
                assert fingerprint_tensor(raw) != fingerprint_tensor(raw.roll(1)), (
                    "order counts"
                )
    for dtype in (torch.uint8, torch.bfloat16, torch.float64):
        long = torch.arange(20).to(dtype)
        assert fingerprint_tensor(long[1:14]) == fingerprint_tensor(
            long[1:14].clone()
        ), "wherever it lies in memory"
    assert fingerprint_tensor(torch.zeros(4)) != fingerprint_tensor(torch.zeros(2, 2))
    assert fingerprint_tensor(torch.zeros(2)) != fingerprint_tensor(
        torch.zeros(2, dtype=torch.int32)
    )
