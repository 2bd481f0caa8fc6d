"""Resuming is the same as never having stopped: after every batch, with workers, on other numbers of ranks."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    WeightedRandomSampler,
)

from hasten.data.loader import Loader
from hasten.data.skipping import skip_first_batches
from hasten.errors import ConfigError, DataError
from tests.support.loaders import CountingStream, global_order, prepared, seen

DATA = list(range(21))
WORLDS = ((1, 1), (2, 2), (2, 4), (4, 2))  # before and after a crash
Build = Callable[[], DataLoader[Any]]


def shuffled_loader(num_workers: int = 0, batch: int = 2) -> DataLoader[Any]:
    return DataLoader(DATA, batch_size=batch, shuffle=True, num_workers=num_workers)  # type: ignore[arg-type]


def states_after_crash(
    build: Build, world: int, num_batches: int, epoch: int = 1, **settings: Any
) -> list[dict[str, Any]]:
    """Each rank's state when the run stops with `num_batches` batches of `epoch` done; what a file would hold."""
    states = []
    for rank in range(world):
        loader = prepared(build(), rank, world, **settings)
        loader.set_epoch(epoch)
        if num_batches:
            seen(loader, limit=num_batches)
        states.append(json.loads(json.dumps(loader.state_dict())))
    return states


def resume_loaders(
    build: Build, world: int, states: list[dict[str, Any]], **settings: Any
) -> list[Loader]:
    loaders = [
        prepared(build(), rank, world, seed=100 + rank, **settings)
        for rank in range(world)
    ]
    for rank, loader in enumerate(loaders):
        loader.load_state_dict(states[rank] if rank < len(states) else states[0])
    return loaders


@pytest.mark.parametrize(
    ("saving_world", "resuming_world", "num_workers"),
    [
        *((saving_world, resuming_world, 0) for saving_world, resuming_world in WORLDS),
        (2, 2, 2),
        *(
            pytest.param(*worlds, 2, marks=pytest.mark.exhaustive)
            for worlds in WORLDS
            if worlds != (2, 2)
        ),
    ],
)
def test_a_crash_after_every_batch_loses_and_repeats_nothing(
    saving_world: int, resuming_world: int, num_workers: int
) -> None:
    def build() -> DataLoader[Any]:
        return shuffled_loader(num_workers)

    reference_loaders = [
        prepared(shuffled_loader(), rank, saving_world) for rank in range(saving_world)
    ]
    for loader in reference_loaders:
        loader.set_epoch(1)
    uninterrupted = [seen(loader) for loader in reference_loaders]
    order = global_order(uninterrupted)
    assert sorted(order) == DATA
    for stop in range(1, len(uninterrupted[0]) + 1):
        states = states_after_crash(lambda: shuffled_loader(), saving_world, stop)
        loaders = resume_loaders(build, resuming_world, states)
        remaining_shares = [seen(loader) for loader in loaders]
        assert global_order(remaining_shares) == order[stop * saving_world * 2 :]
        if saving_world == resuming_world:
            assert remaining_shares == [share[stop:] for share in uninterrupted]
        assert all(loader.epoch == 2 for loader in loaders)
    if num_workers == 0:  # and the epoch after is the same, too
        following = [seen(loader) for loader in reference_loaders]
        assert global_order([seen(loader) for loader in loaders]) == global_order(
            following
        )


def test_the_same_global_batch_on_another_world_gives_the_same_steps() -> None:
    one_rank_batches = seen(prepared(shuffled_loader(batch=4)))
    for stop in range(6):
        states = states_after_crash(lambda: shuffled_loader(batch=4), 1, stop, epoch=0)
        for world, batch, split in ((2, 2, False), (4, 1, False), (2, 4, True)):
            loaders = resume_loaders(
                lambda batch=batch: shuffled_loader(batch=batch),  # type: ignore[misc]
                world,
                states,
                split_batches=split,
            )
            shares = [seen(loader) for loader in loaders]
            steps = [
                global_order([[share[step]] for share in shares])
                for step in range(len(shares[0]))
            ]
            assert steps == [row.values for row in one_rank_batches[stop:]]


class HalvesSampler(Sampler[list[int]]):
    def __iter__(self) -> Iterator[list[int]]:
        order = np.random.permutation(21).tolist()
        yield from (order[first : first + 1 + first % 3] for first in range(0, 21, 3))


@pytest.mark.parametrize("world", [1, 2])
def test_samplers_of_the_user_resume_in_the_order_they_drew(world: int) -> None:
    def weighted_loader() -> DataLoader[Any]:
        return DataLoader(
            DATA,  # type: ignore[arg-type]
            batch_size=2,
            sampler=WeightedRandomSampler([1.0] * 21, 21),
        )

    def batched_loader() -> DataLoader[Any]:
        return DataLoader(DATA, batch_sampler=HalvesSampler())  # type: ignore[arg-type]

    for build in (weighted_loader, batched_loader):
        full_shares = [seen(prepared(build(), rank, world)) for rank in range(world)]
        for stop in range(len(full_shares[0]) + 1):
            loaders = resume_loaders(
                build, world, states_after_crash(build, world, stop, epoch=0)
            )
            assert [seen(loader) for loader in loaders] == [
                share[stop:] for share in full_shares
            ]


def test_a_generator_of_the_user_is_wound_back_with_the_position() -> None:
    def build() -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(1)
        return DataLoader(
            DATA,  # type: ignore[arg-type]
            batch_size=4,
            sampler=RandomSampler(DATA, generator=generator),
        )

    loader = prepared(build(), use_seedable_sampler=False)
    seen(loader)
    second = seen(loader)
    third = seen(loader)
    state = None
    loader = prepared(build(), use_seedable_sampler=False)
    seen(loader)
    for number, _ in enumerate(loader):
        if number == 1:
            state = json.loads(json.dumps(loader.state_dict()))
    assert state is not None
    resumed_loader = prepared(build(), use_seedable_sampler=False)
    resumed_loader.load_state_dict(state)
    assert seen(resumed_loader) == second[2:]
    assert seen(resumed_loader) == third


class AugmentedDataset(Dataset[float]):
    """Draws from all three global random states for each sample."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> float:
        return (
            index
            + (float(torch.rand(())) + random.random() + float(np.random.rand())) / 4
        )


def test_augmentation_in_workers_is_the_same_after_a_resume() -> None:
    def build() -> DataLoader[Any]:
        return DataLoader(AugmentedDataset(), batch_size=2, shuffle=True, num_workers=2)

    for world in (1, 2):
        full_share = seen(prepared(build(), world - 1, world))
        assert len({value for row in full_share for value in row.values}) == 12 // world
        states = states_after_crash(build, world, 2, epoch=0)
        assert seen(resume_loaders(build, world, states)[-1]) == full_share[2:]


@pytest.mark.parametrize(
    "num_workers", [0, pytest.param(2, marks=pytest.mark.exhaustive)]
)
def test_streams_resume_after_every_batch(num_workers: int) -> None:
    def build() -> DataLoader[Any]:
        return DataLoader(
            CountingStream(13 if num_workers else 23),
            batch_size=2,
            num_workers=num_workers,
        )

    for world in (1, 2) if not num_workers else (2,):
        full_shares = [seen(prepared(build(), rank, world)) for rank in range(world)]
        for stop in range(len(full_shares[0]) + 1):
            loaders = resume_loaders(
                build, world, states_after_crash(build, world, stop, epoch=0)
            )
            assert [seen(loader) for loader in loaders] == [
                share[stop:] for share in full_shares
            ]


@pytest.mark.parametrize(
    ("saving_world", "resuming_world"), [(1, 2), (2, 4), (4, 2), (2, 1)]
)
def test_streams_resume_on_another_world(
    saving_world: int, resuming_world: int
) -> None:
    def build() -> DataLoader[Any]:
        return DataLoader(CountingStream(23), batch_size=2)

    order = global_order(
        [seen(prepared(build(), rank, saving_world)) for rank in range(saving_world)]
    )
    for stop in range(1, 23 // (2 * saving_world) + 1):
        loaders = resume_loaders(
            build,
            resuming_world,
            states_after_crash(build, saving_world, stop, epoch=0),
        )
        assert (
            global_order([seen(loader) for loader in loaders])
            == order[stop * saving_world * 2 :]
        )


def test_the_position_of_a_stream_belongs_to_its_workers_and_shards() -> None:
    states = states_after_crash(
        lambda: DataLoader(CountingStream(23), batch_size=2, num_workers=2),
        1,
        2,
        epoch=0,
    )
    with pytest.raises(DataError, match="Set num_workers=2"):
        seen(
            resume_loaders(
                lambda: DataLoader(CountingStream(23), batch_size=2), 1, states
            )[0]
        )

    class SelfShardingStream(IterableDataset[int]):
        def shard(self, num_shards: int, index: int) -> Any:
            return iter(range(index, 23, num_shards))

        def __iter__(self) -> Iterator[int]:
            return iter(range(23))

    states = states_after_crash(
        lambda: DataLoader(SelfShardingStream(), batch_size=2), 2, 2, epoch=0
    )
    with pytest.raises(DataError, match="Resume on 2 data-parallel processes"):
        seen(
            resume_loaders(
                lambda: DataLoader(SelfShardingStream(), batch_size=2), 4, states
            )[0]
        )


def rows_of(shard: list[list[int]]) -> Iterator[dict[str, int]]:
    for shard_values in shard:
        for value in shard_values:
            yield {"x": value}


def xs_of(samples: list[dict[str, int]]) -> list[int]:
    return [sample["x"] for sample in samples]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_hub_streams_resume_by_their_own_state(num_workers: int) -> None:
    values_by_shard = [
        [shard * 100 + value for value in range(7)] for shard in range(4)
    ]

    def build() -> DataLoader[Any]:
        stream = datasets.IterableDataset.from_generator(
            rows_of, gen_kwargs={"shard": values_by_shard}
        )
        return DataLoader(
            stream, batch_size=2, collate_fn=xs_of, num_workers=num_workers
        )

    for world in (1, 2) if not num_workers else (2,):
        full_shares = [seen(prepared(build(), rank, world)) for rank in range(world)]
        for stop in (
            (3, len(full_shares[0]) - 1)
            if num_workers
            else range(1, len(full_shares[0]) + 1)
        ):
            states = states_after_crash(build, world, stop, epoch=0)
            assert "states" in states[0]["stream"]
            loaders = resume_loaders(build, world, states)
            assert [seen(loader) for loader in loaders] == [
                share[stop:] for share in full_shares
            ], (world, stop)


def test_workers_that_live_on_see_a_loaded_position() -> None:
    def build(persistent: bool) -> DataLoader[Any]:
        return DataLoader(
            CountingStream(12),
            batch_size=2,
            num_workers=2,
            persistent_workers=persistent,
        )

    loader = prepared(build(True))
    full_share = seen(loader)
    state = states_after_crash(lambda: build(False), 1, 3, epoch=0)[0]
    loader.load_state_dict(state)
    assert seen(loader) == full_share[3:]
    assert seen(loader) == full_share


def test_state_is_where_the_loop_stands() -> None:
    loader = prepared(shuffled_loader())
    assert loader.state_dict()["consumed"] == 0
    for number, _ in enumerate(loader, 1):
        assert (loader.state_dict()["epoch"], loader.state_dict()["consumed"]) == (
            0,
            min(2 * number, 21),
        )
    assert (loader.state_dict()["epoch"], loader.state_dict()["consumed"]) == (1, 0)
    seen(loader, limit=3)  # a break keeps the position, for a save after the loop
    assert (loader.state_dict()["epoch"], loader.state_dict()["consumed"]) == (1, 6)


def test_reading_ahead_does_not_move_the_position() -> None:
    for prefetch, num_workers in itertools.product((1, 3, 50), (0, 2)):
        loader = prepared(shuffled_loader(num_workers), prefetch=prefetch)
        plain = seen(prepared(shuffled_loader()))
        rows = []
        for number, batch in enumerate(loader, 1):
            rows.append(batch.tolist())
            assert loader.state_dict()["consumed"] == min(2 * number, 21)
            assert loader.cursor.at_end is (number == 11)
        assert rows == [row.values for row in plain]


def test_a_state_saved_on_the_last_batch_ends_that_epoch_and_goes_on() -> None:
    loader = prepared(shuffled_loader())
    first, second = seen(loader), seen(loader)
    (state,) = states_after_crash(lambda: shuffled_loader(), 1, len(first), epoch=0)
    (resumed_loader,) = resume_loaders(lambda: shuffled_loader(), 1, [state])
    assert seen(resumed_loader) == []
    assert seen(resumed_loader) == second


def test_set_epoch_keeps_a_position_of_that_epoch_only() -> None:
    (state,) = states_after_crash(lambda: shuffled_loader(), 1, 4, epoch=3)
    (loader,) = resume_loaders(lambda: shuffled_loader(), 1, [state])
    loader.set_epoch(3)
    assert len(seen(loader)) == 7
    (loader,) = resume_loaders(lambda: shuffled_loader(), 1, [state])
    loader.set_epoch(4)
    assert len(seen(loader)) == 11


def test_states_of_other_data_are_refused() -> None:
    (state,) = states_after_crash(lambda: shuffled_loader(), 1, 4)
    longer = prepared(DataLoader(range(30), batch_size=2))  # type: ignore[arg-type]
    with pytest.raises(DataError, match=r"epoch of 21.*has 30"):
        longer.load_state_dict(state)
    with pytest.raises(
        DataError, match="counts samples, and this loader counts stream"
    ):
        prepared(DataLoader(CountingStream(21), batch_size=2)).load_state_dict(state)
    with pytest.raises(DataError, match="has version None"):
        longer.load_state_dict({"step": 3})
    with pytest.raises(DataError, match="version 2"):
        longer.load_state_dict({**state, "version": 2})
    (fresh,) = states_after_crash(lambda: shuffled_loader(), 1, 0, epoch=5)
    longer.load_state_dict(fresh)  # nothing consumed: any data can begin there
    assert longer.epoch == 5


def test_skipping_counts_from_the_beginning_of_the_epoch() -> None:
    for world in (1, 2):
        loader = prepared(shuffled_loader(), 0, world)
        full_share = seen(prepared(shuffled_loader(), 0, world))
        for count in (0, 1, 4, 50):
            loader.set_epoch(0)
            skipping = skip_first_batches(loader, count)
            assert isinstance(skipping, Loader)
            assert len(skipping) == max(len(full_share) - count, 0)
            assert seen(skipping) == full_share[count:]
            # the loader it came from goes on with the next epoch
            assert loader.epoch == 1
        (state,) = states_after_crash(lambda: shuffled_loader(), 1, 3, epoch=0)
        loader.load_state_dict(state)
        assert seen(skip_first_batches(loader, 4)) == full_share[4:]  # type: ignore[arg-type]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_skipping_in_streams(num_workers: int) -> None:
    def build() -> DataLoader[Any]:
        return DataLoader(CountingStream(23), batch_size=2, num_workers=num_workers)

    full_share = seen(prepared(build(), 1, 2))
    for count in (1, 2, 3):
        skipping = skip_first_batches(prepared(build(), 1, 2), count)
        assert seen(skipping) == full_share[count:]  # type: ignore[arg-type]


def test_skipping_in_plain_loaders_keeps_every_setting() -> None:
    plain: list[DataLoader[Any]] = [
        DataLoader(DATA, batch_size=4, num_workers=2, drop_last=True, timeout=9.0),  # type: ignore[arg-type]
        DataLoader(
            DATA,  # type: ignore[arg-type]
            batch_size=4,
            shuffle=True,
            generator=torch.Generator().manual_seed(0),
        ),
        DataLoader(DATA, batch_size=None),  # type: ignore[arg-type]
        DataLoader(CountingStream(21), batch_size=4),
        DataLoader(DATA, batch_sampler=[[1, 2], [3], [4, 5, 6]]),  # type: ignore[arg-type]
    ]
    for loader in plain:
        state = None if loader.generator is None else loader.generator.get_state()
        all_batches = [
            batch.tolist() if isinstance(batch, torch.Tensor) else batch
            for batch in loader
        ]
        if state is not None:
            loader.generator.set_state(state)
        skipping = skip_first_batches(loader, 2)
        remaining_batches = [
            batch.tolist() if isinstance(batch, torch.Tensor) else batch
            for batch in skipping
        ]
        assert remaining_batches == all_batches[2:]
        for name in (
            "num_workers",
            "collate_fn",
            "timeout",
            "generator",
            "drop_last",
            "dataset",
            "batch_size",
        ):
            assert getattr(skipping, name) == getattr(loader, name)
        if not isinstance(loader.dataset, IterableDataset):
            assert len(skipping) == len(all_batches) - 2
    with pytest.raises(ConfigError, match="forwards only"):
        skip_first_batches(plain[0], -1)


def test_entering_at_batch_one_million_costs_no_reading() -> None:
    size = 10_000_000_000
    loader = prepared(DataLoader(range(size), batch_size=8, shuffle=True))  # type: ignore[arg-type]
    state = {**loader.state_dict(), "consumed": 8_000_000}
    loader.load_state_dict(state)
    assert len(seen(loader, limit=1)[0].values) == 8
    assert loader.state_dict()["consumed"] == 8_000_008
