"""Each quirk that is kept, proven; a test says which one by its mark in PROVEN."""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from accelerate import Accelerator, PartialState
from accelerate.data_loader import (
    BatchSamplerShard,
    DataLoaderDispatcher,
    SeedableRandomSampler,
)
from accelerate.logging import get_logger
from accelerate.scheduler import AcceleratedScheduler
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import (
    DataLoaderConfiguration,
    ProjectConfiguration,
    gather_object,
)
from hasten.errors import HastenWarning

TESTS_FOLDER = Path(__file__).parent
# Quirks that the recorded scripts prove on one and two processes, by the script's name.
RECORDED = {
    "SHUFFLE_FOLLOWS_TORCH": "shuffle_plain",
    "SEEDABLE_ORDER": "shuffle_seedable",
    "LAST_BATCH_IS_FULL": "batches_sequential",
    "LAST_BATCH_IS_CUT": "metrics_tail",
    "NESTED_FIRST": "main_first",
    "GATHER_OBJECT_JOINS": "objects",
    "FLAT_RESULTS": "gather_kinds",
    "ONE_PROCESS_IS_ALL": "deferred_execution",
    "LOG_LINES_NAME_THE_RANK": "log_lines",
    "STRANGERS_PASS": "prepare_strangers",
    "PRECISION_IS_FIXED": "precision_fixed",
    "ESTABLISHED_NAMES": "checkpoint_files",
    "FREE_MEMORY_GIVES_LIST": "free_memory",
    "SCHEDULER_TIMES_PROCESSES": "train_plain",
    "SCALE_IS_FOR_XLA": "gather_kinds",
    "SHORT_WINDOW_FULL_DIVISOR": "short_window",
    "FOLDER_OF_EACH_PROCESS": "checkpoint_own_folders",
}


pytestmark = pytest.mark.usefixtures("fresh_states")


def _trained(
    accelerator: Accelerator,
) -> tuple[nn.Module, torch.optim.Optimizer, AcceleratedScheduler]:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    prepared = accelerator.prepare(model, optimizer, scheduler)
    return prepared[0], prepared[1], prepared[2]


def quirks() -> set[str]:
    """The names in QUIRKS.md."""
    rows = re.findall(
        r"^\| `([A-Z_]+)` \| (.+) \| (.+) \|$",
        (TESTS_FOLDER.parent / "QUIRKS.md").read_text(),
        re.MULTILINE,
    )
    assert all(habit.strip() and reason.strip() for _, habit, reason in rows)
    return {name for name, _, _ in rows}


def test_every_quirk_has_a_proof() -> None:
    proven = {
        name
        for line in re.findall(
            r"^ +# proves ([A-Z_, ]+)$", Path(__file__).read_text(), re.MULTILINE
        )
        for name in line.split(", ")
    }
    assert quirks() == {*RECORDED, *proven}
    assert all(
        (TESTS_FOLDER / "parity" / f"{script}.py").exists()
        for script in RECORDED.values()
    )


def test_every_quirk_marks_the_code_it_excuses() -> None:
    rooms = TESTS_FOLDER.parent / "src" / "accelerate" / "_impl"
    marks = {
        name
        for file in rooms.rglob("*.py")
        for name in re.findall(r"# quirk: ([A-Z_]+)", file.read_text())
    }
    assert marks == quirks()


def test_states_are_process_wide() -> None:
    # proves SINGLETONS
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
    assert AcceleratorState().device == accelerator.device == PartialState().device
    assert GradientState().num_steps == 3
    with pytest.raises(ValueError, match="properly initialize"):
        AcceleratorState._reset_state()
        AcceleratorState()


def test_prepare_names_a_reset_of_the_states() -> None:
    """`free_memory()` works after a reset: tests of other libraries call it when they clean up."""
    accelerator = Accelerator(cpu=True)
    AcceleratorState._reset_state()
    with pytest.raises(AttributeError, match="_reset_state"):
        accelerator.prepare(nn.Linear(1, 1))
    assert accelerator.free_memory() == []


def test_zero_grad_waits_and_schedulers_count_micro_steps() -> None:
    # proves ZERO_GRAD_WAITS, SCHEDULER_COUNTS_MICRO_STEPS
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, optimizer, scheduler = _trained(accelerator)
    counts, rates = [], []
    for _ in range(4):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(1, 1)).sum())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            weight = next(iter(model.parameters()))
            counts.append(weight.grad is None)
            rates.append(scheduler.get_last_lr()[0])
    assert counts == [False, True, False, True]
    assert rates == [1.0, 0.5, 0.5, 0.25]


@pytest.mark.parametrize("policy", [None, "report"])
def test_a_loss_that_is_nan_warns_only_if_asked(
    policy: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    # proves NAN_IS_SILENT
    if policy is not None:
        monkeypatch.setenv("HASTEN_TRUST_NUMBERS", policy)
    accelerator = Accelerator(cpu=True)
    model, optimizer, _ = _trained(accelerator)
    with warnings.catch_warnings(record=True) as caught_warnings:
        warnings.simplefilter("always")
        accelerator.backward(model(torch.full((1, 1), torch.nan)).sum())
        optimizer.step()
        accelerator.end_training()
    assert [type(caught.message) for caught in caught_warnings] == (
        [] if policy is None else [HastenWarning]
    )


def test_a_logger_needs_a_state(caplog: pytest.LogCaptureFixture) -> None:
    # proves LOGGER_NEEDS_STATE
    logger = get_logger("quirk")
    with pytest.raises(RuntimeError, match="initialize the accelerate state"):
        logger.warning("too early")
    PartialState(cpu=True)
    with caplog.at_level(logging.INFO):
        logger.info("now")
    assert "now" in caplog.text
    assert logging.getLogger().level != logging.DEBUG


def test_streams_are_dispatched() -> None:
    # proves STREAMS_ARE_DISPATCHED

    class Stream(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(5))

    loader = Accelerator(cpu=True).prepare(DataLoader(Stream(), batch_size=2))
    assert isinstance(loader, DataLoaderDispatcher)
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3], [4]]


def test_numbering_and_blank_trackers_are_opt_in(tmp_path: Path) -> None:
    # proves AUTOMATIC_NAMING_OPT_IN, MISSING_TRACKER_IS_BLANK
    accelerator = Accelerator(cpu=True, project_dir=str(tmp_path))
    with pytest.raises(TypeError):
        accelerator.save_state()
    with pytest.raises(ValueError, match="automatic checkpoint naming is disabled"):
        accelerator.load_state()
    accelerator.get_tracker("wandb").log({"x": 1})


@pytest.mark.parametrize("stateful", [False, True])
def test_position_is_opt_in_and_the_epoch_is_always_restored(
    tmp_path: Path, stateful: bool
) -> None:
    # proves POSITION_IS_OPT_IN
    config = DataLoaderConfiguration(
        use_stateful_dataloader=stateful, use_seedable_sampler=True, data_seed=4
    )

    def make() -> tuple[Accelerator, DataLoader[tuple[torch.Tensor]]]:
        AcceleratorState._reset_state(True)
        fresh_accelerator = Accelerator(
            cpu=True,
            dataloader_config=config,
            project_config=ProjectConfiguration(str(tmp_path)),
        )
        return fresh_accelerator, fresh_accelerator.prepare(
            DataLoader(TensorDataset(torch.arange(8)), batch_size=2, shuffle=True)
        )

    accelerator, loader = make()
    list(loader)
    order = []
    for number, (x,) in enumerate(loader):
        order.append(x.tolist())
        if number == 1:
            accelerator.save_state(str(tmp_path / "saved"))
    accelerator, loader = make()
    accelerator.load_state(str(tmp_path / "saved"))
    assert [x.tolist() for (x,) in loader] == (order[2:] if stateful else order)


class Own(list[list[int]]):
    """A batch sampler of one's own, which says how large its batches are."""

    batch_size = 2
    drop_last = False


def test_samplers_follow_their_laws() -> None:
    for size in range(1, 20):
        for ranks in (1, 2, 3):
            for batch in (1, 2, 4):
                batches = torch.utils.data.BatchSampler(range(size), batch, False)
                shards = [
                    list(BatchSamplerShard(batches, ranks, rank))
                    for rank in range(ranks)
                ]
                assert len({len(shard) for shard in shards}) == 1
                assert {
                    row for shard in shards for rows in shard for row in rows
                } == set(range(size))
                assert all(
                    len(shard) == len(BatchSamplerShard(batches, ranks, rank))
                    for rank, shard in enumerate(shards)
                )
                uneven = [
                    list(BatchSamplerShard(batches, ranks, rank, even_batches=False))
                    for rank in range(ranks)
                ]
                rows = sorted(row for shard in uneven for rows in shard for row in rows)
                assert rows == list(range(size))
    # a short batch in the middle stays as it is
    short = [[0, 1], [2], [3, 4], [5, 6], [7]]
    assert [list(BatchSamplerShard(Own(short), 2, rank)) for rank in (0, 1)] == [
        [[0, 1], [3, 4], [7, 0]],
        [[2], [5, 6], [1, 2]],
    ]
    sampler = SeedableRandomSampler(range(6), data_seed=2)
    first, second = list(sampler), list(sampler)
    sampler.set_epoch(0)
    assert list(sampler) == first != second
    assert gather_object([1]) == [1]
