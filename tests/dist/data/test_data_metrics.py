"""Loaders and the Accelerator together: every real sample once in the metrics, and checkpoints that go on on another world."""

from __future__ import annotations

import itertools
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from hasten import Accelerator, DataLoaderConfiguration
from hasten.errors import ArgumentError, DataError, MismatchError
from hasten.runtime.context import ProcessContext
from hasten.testing.pool import Pool, ranks
from tests.support.loaders import CountingStream


@ranks(1, 2, exhaustive=(3,))
def test_metrics_see_every_sample_once_and_in_order(ctx: ProcessContext) -> None:
    for dispatch, size, batch in itertools.product(
        (False, True), (1, 2, 7, 12, 13), (1, 4)
    ):
        config = DataLoaderConfiguration(dispatch_batches=dispatch)
        accelerator = Accelerator(cpu=True, dataloader_config=config)
        for data in (torch.arange(size), CountingStream(size)):
            user: DataLoader[Any] = DataLoader(data, batch_size=batch)  # type: ignore[arg-type]
            loader = accelerator.prepare(user)
            gathered = [accelerator.gather_for_metrics(x) for x in loader]
            assert torch.cat(gathered).tolist() == list(range(size)), (
                dispatch,
                size,
                batch,
                type(data),
            )


@ranks(2, 3)
def test_items_without_rows_are_counted_once_too(ctx: ProcessContext) -> None:
    accelerator = Accelerator(cpu=True)
    for data in (torch.arange(7), CountingStream(7)):
        user: DataLoader[Any] = DataLoader(
            data,  # type: ignore[arg-type]
            batch_size=None,
            collate_fn=torch.as_tensor,
        )
        gathered = [
            accelerator.gather_for_metrics(x) for x in accelerator.prepare(user)
        ]
        assert torch.cat(gathered).tolist() == list(range(7)), type(data)


def time_major(samples: list[int]) -> dict[str, torch.Tensor]:
    """Three time steps first, then the batch."""
    ids = torch.tensor(samples)
    return {"steps": ids.repeat(3, 1), "ids": ids}


@ranks(2, exhaustive=(3,))
def test_batches_that_are_not_batch_first_are_counted_by_the_plan(
    ctx: ProcessContext,
) -> None:
    for dispatch, stream, size in itertools.product(
        (False, True), (False, True), (11, 13)
    ):
        accelerator = Accelerator(
            cpu=True,
            dataloader_config=DataLoaderConfiguration(dispatch_batches=dispatch),
        )
        data: Any = CountingStream(size) if stream else list(range(size))
        loader = accelerator.prepare(
            DataLoader(data, batch_size=4, collate_fn=time_major)
        )
        ids, flat, objects = [], [], []
        for batch in loader:
            ids.append(accelerator.gather_for_metrics(batch["steps"].amax(0)))
            # rows of B * T
            flat.append(accelerator.gather_for_metrics(batch["steps"].T.reshape(-1)))
            objects += accelerator.gather_for_metrics(
                batch["ids"].tolist(), use_gather_object=True
            )
        assert torch.cat(ids).tolist() == list(range(size)), (dispatch, stream, size)
        assert torch.cat(flat).tolist() == [
            sample_id for sample_id in range(size) for _ in range(3)
        ]
        assert objects == list(range(size))


@ranks(2, 3)
def test_time_major_results_are_cut_along_the_named_dimension(
    ctx: ProcessContext,
) -> None:
    """Sizes whose last batch is padded, among them those with as many time steps as samples."""
    for size, steps in itertools.product((7, 9, 10, 11, 13, 23), (2, 3, 4)):
        accelerator = Accelerator(cpu=True)
        user: DataLoader[Any] = DataLoader(torch.arange(size), batch_size=4)  # type: ignore[arg-type]
        for dim in (1, -1):
            gathered = [
                accelerator.gather_for_metrics(x.repeat(steps, 1), dim=dim)
                for x in accelerator.prepare(user)
            ]
            assert torch.equal(
                torch.cat(gathered, 1), torch.arange(size).repeat(steps, 1)
            ), (size, steps, dim)


@ranks(2)
def test_a_layout_that_could_be_either_is_reported(ctx: ProcessContext) -> None:
    """Seven samples: the padded rank holds two, one of them real; two time steps look like the samples."""
    accelerator = Accelerator(cpu=True)
    user: DataLoader[Any] = DataLoader(torch.arange(7), batch_size=2)  # type: ignore[arg-type]
    padded = ctx.rank == 1
    for steps, dim, is_reported in ((2, None, padded), (2, 0, False), (2, 1, False)):
        with warnings.catch_warnings(record=True) as caught_warnings:
            warnings.simplefilter("always")
            for x in accelerator.prepare(user):
                accelerator.gather_for_metrics(x.repeat(steps, 1), dim=dim)
        assert (
            any(
                "Pass dim=0 or dim=1" in str(caught.message)
                for caught in caught_warnings
            )
            == is_reported
        ), (
            steps,
            dim,
            caught_warnings,
        )
    for step, x in enumerate(accelerator.prepare(user)):
        if step == 0:
            accelerator.gather_for_metrics(x.repeat(3, 1))
            continue
        with pytest.raises(
            (DataError, MismatchError), match="Pass dim=1" if padded else None
        ):
            accelerator.gather_for_metrics(x.repeat(3, 1))
    for bad, result in ((1, x), ("a", x), (True, x), (1.5, x), (0, ["objects"])):
        with pytest.raises(ArgumentError, match="dim"):
            accelerator.gather_for_metrics(result, dim=bad)  # type: ignore[arg-type]


@ranks(2)
def test_rows_that_cannot_be_told_from_padding_are_refused_everywhere(
    ctx: ProcessContext,
) -> None:
    accelerator = Accelerator(cpu=True)
    user: DataLoader[Any] = DataLoader(torch.arange(11), batch_size=4)  # type: ignore[arg-type]
    for objects in (False, True):
        errors = 0
        for x in accelerator.prepare(user):
            result = torch.cat([x, x[:1]])
            try:
                accelerator.gather_for_metrics(
                    result.tolist() if objects else result, objects
                )
            except (DataError, MismatchError):
                errors += 1
        assert errors == 1, (
            "the last batch alone is padded, on one rank, and both raise"
        )


def part_of_a_run(
    ctx: ProcessContext, folder: Path, stop: int, batch: int, resume: bool
) -> list[list[int]]:
    """The samples of each step that all ranks took together, from the beginning or from a checkpoint."""
    # a resumed run takes its seed from the checkpoint
    torch.manual_seed(3 if not resume else 99)
    accelerator = Accelerator(cpu=True)
    user: DataLoader[Any] = DataLoader(torch.arange(50), batch_size=batch, shuffle=True)  # type: ignore[arg-type]
    loader = accelerator.prepare(user)
    steps: list[list[int]] = []
    if resume:
        accelerator.load_state(folder)
    for _ in range(2):
        for x in loader:
            steps.append(accelerator.gather_for_metrics(x).tolist())
            if len(steps) == stop:
                accelerator.save_state(folder)
                return steps
    return steps


@pytest.mark.parametrize(
    ("old_world", "new_world"),
    [
        (1, 2),
        (2, 4),
        *(
            pytest.param(*worlds, marks=pytest.mark.exhaustive)
            for worlds in ((2, 2), (4, 2))
        ),
    ],
)
def test_a_checkpoint_resumes_on_another_world_with_the_same_global_batches(
    rank_pool: Pool, tmp_path: Path, old_world: int, new_world: int
) -> None:
    uninterrupted = rank_pool.run(part_of_a_run, 1, tmp_path / "none", -1, 4, False)[0]
    assert sorted(sample for step in uninterrupted for sample in step) == sorted(
        [*range(50)] * 2
    )
    for stop in (5, 13, 20):
        folder = tmp_path / f"after-{stop}"
        first = rank_pool.run(
            part_of_a_run, old_world, folder, stop, 4 // old_world, False
        )[0]
        resumed_steps = rank_pool.run(
            part_of_a_run, new_world, folder, -1, 4 // new_world, True
        )[0]
        # the resumed program passes over the loader twice, whatever is left
        epochs_left = 2 if stop <= 13 else 1
        expected = uninterrupted[stop:]
        assert first == uninterrupted[:stop]
        assert resumed_steps[: len(expected)] == expected
        assert len(resumed_steps) == len(expected) + (0 if epochs_left == 2 else 13)
