"""A prepared loader is the user's DataLoader: settings, length, epochs, cursor and clock."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, get_worker_info

from hasten.data.loader import Loader
from hasten.errors import DataError, PrepareError
from hasten.optim.clock import StepClock
from hasten.runtime.mesh_plan import MeshSpec
from tests.support.loaders import CountingStream, global_order, prepared, seen


class Squares(Dataset[int]):
    def __init__(self, size: int = 20) -> None:
        self.size = size
        self.received: list[int] = []

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        return index * index

    def set_epoch(self, epoch: int) -> None:
        self.received.append(epoch)


def collate_list(samples: list[int]) -> list[int]:
    return list(samples)


def init_worker(worker: int) -> None:
    get_worker_info().dataset.received.append(worker)  # type: ignore[union-attr] # inside a worker there is one


def test_every_setting_survives() -> None:
    loader_options: dict[str, Any] = {
        "num_workers": 2,
        "collate_fn": collate_list,
        "pin_memory": True,
        "timeout": 30.0,
        "worker_init_fn": init_worker,
        "multiprocessing_context": "spawn",
        "generator": torch.Generator().manual_seed(3),
        "prefetch_factor": 4,
        "persistent_workers": True,
        "pin_memory_device": "",
    }
    user = DataLoader(
        Squares(), batch_size=3, shuffle=True, drop_last=True, **loader_options
    )
    loader = prepared(user, 1, 2)
    assert isinstance(loader, Loader)
    assert isinstance(loader, DataLoader)
    for engine in (loader, loader.parts.source.engine):
        for name, value in loader_options.items():
            if name == "collate_fn" or engine is loader:
                assert getattr(engine, name) == getattr(user, name), (name, value)
    assert loader.dataset is user.dataset
    assert loader.sampler is user.sampler
    assert (loader.batch_size, loader.drop_last) == (3, True)
    assert isinstance(loader.batch_sampler, BatchSampler)
    assert (loader.batch_sampler.batch_size, loader.batch_sampler.drop_last) == (
        3,
        True,
    )
    assert len(loader) == 20 // 6 == len(loader.batch_sampler)
    assert loader.total_batch_size == 6
    assert loader.total_dataset_length == 20
    assert user.batch_size == 3  # the user's own loader is untouched
    assert len(user) == 6


def test_settings_work_in_real_workers() -> None:
    for method, num_workers in (("fork", 2), ("spawn", 1)):
        user = DataLoader(
            Squares(8),
            batch_size=2,
            num_workers=num_workers,
            multiprocessing_context=method,
            worker_init_fn=init_worker,
            collate_fn=collate_list,
            persistent_workers=True,
        )
        loader = prepared(user)
        for _ in range(2):
            assert [row.values for row in seen(loader)] == [
                [0, 1],
                [4, 9],
                [16, 25],
                [36, 49],
            ]
        del loader, user


def test_preparing_twice_changes_nothing() -> None:
    loader = prepared(DataLoader(Squares(), batch_size=2), 0, 2)
    assert prepared(loader, 0, 2) is loader


def test_the_batch_sampler_shows_this_ranks_batches() -> None:
    loader = prepared(DataLoader(range(10), batch_size=2, shuffle=True), 1, 2)  # type: ignore[arg-type]
    shown = list(loader.batch_sampler)  # type: ignore[arg-type]
    assert shown == [row.values for row in seen(loader)]


def test_each_pass_takes_the_next_epoch_and_set_epoch_is_forwarded() -> None:
    data = Squares(12)
    loader = prepared(DataLoader(data, batch_size=4, shuffle=True))
    first, second = seen(loader), seen(loader)
    assert first != second
    assert data.received == [0, 1]
    assert loader.epoch == 2
    loader.set_epoch(1)
    assert seen(loader) == second
    seen(loader, limit=1)  # abandoned: the next pass is another epoch
    assert loader.epoch == 2
    seen(loader)
    assert data.received == [0, 1, 1, 2, 3]


def test_shuffling_leaves_the_global_random_states_alone() -> None:
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    initial_states = (
        torch.get_rng_state(),
        random.getstate(),
        str(np.random.get_state()),
    )
    loader = prepared(DataLoader(Squares(), batch_size=3, shuffle=True, num_workers=2))
    seen(loader)
    assert torch.equal(initial_states[0], torch.get_rng_state())
    assert initial_states[1] == random.getstate()
    assert initial_states[2] == str(np.random.get_state())


def test_the_seed_comes_from_data_seed_then_the_generator_then_the_run() -> None:
    def order(generator: torch.Generator | None = None, **settings: Any) -> list[Any]:
        user = DataLoader(Squares(30), batch_size=5, shuffle=True, generator=generator)
        return global_order([seen(prepared(user, **settings))])

    user_generator = torch.Generator().manual_seed(99)
    assert order(seed=1) != order(seed=2)
    assert (
        order(seed=1, generator=user_generator)
        == order(seed=2, generator=user_generator)
        == order(seed=99)
    )
    assert order(seed=1, generator=user_generator, data_seed=4) == order(seed=4)


def active_cursor(clock: StepClock) -> object:
    # read anew each time: type checkers take the property for a constant
    return clock.active


def test_the_cursor_knows_the_end_and_the_clock_watches_the_loader() -> None:
    clock = StepClock()
    loader = prepared(DataLoader(range(5), batch_size=2), clock=clock)  # type: ignore[arg-type]
    assert active_cursor(clock) is None
    states = []
    for _ in loader:
        assert active_cursor(clock) is loader.cursor
        states.append((loader.cursor.epoch, loader.cursor.batch, loader.cursor.at_end))
    assert states == [(0, 1, False), (0, 2, False), (0, 3, True)]
    assert active_cursor(clock) is None


def test_nested_and_abandoned_loaders_leave_the_clock_right() -> None:
    clock = StepClock()
    outer = prepared(DataLoader(range(6), batch_size=2), clock=clock)  # type: ignore[arg-type]
    inner = prepared(DataLoader(range(4), batch_size=2, num_workers=2), clock=clock)  # type: ignore[arg-type]
    for _ in outer:
        for _ in inner:
            assert active_cursor(clock) is inner.cursor
            break
        assert active_cursor(clock) is outer.cursor
    assert active_cursor(clock) is None

    def failing() -> None:
        for _ in outer:
            for _ in inner:
                raise KeyError("stop")

    with pytest.raises(KeyError, match="stop"):
        failing()
    assert active_cursor(clock) is None
    outer_batches = iter(outer)
    next(outer_batches)
    assert active_cursor(clock) is outer.cursor
    seen(inner)
    assert active_cursor(clock) is outer.cursor
    del outer_batches
    assert active_cursor(clock) is None


def test_peers_of_other_mesh_axes_read_the_same_samples() -> None:
    mesh = MeshSpec.build(8, dp_replicate=2, dp_shard=2, tp=2)
    read = []
    for rank in range(8):
        loader = prepared(
            DataLoader(range(16), batch_size=2, shuffle=True),  # type: ignore[arg-type]
            rank,
            8,
            mesh=mesh,
        )
        assert loader.total_batch_size == 8
        read.append(seen(loader))
    assert all(read[rank] == read[rank + 1] for rank in range(0, 8, 2))
    assert sorted(global_order(read[::2])) == list(range(16))


def test_the_end_of_unordered_workers_cannot_be_known() -> None:
    with pytest.raises(PrepareError, match="in_order=True"):
        prepared(DataLoader(Squares(), num_workers=2, in_order=False))


def test_a_loader_is_not_made_by_hand() -> None:
    with pytest.raises(TypeError, match="prepare"):
        Loader(Squares())


def test_a_subclass_that_iterates_its_own_way_is_refused_when_it_breaks_the_deal() -> (
    None
):
    class Twice(DataLoader[int]):
        def __iter__(self) -> Any:
            for batch in super().__iter__():
                yield batch
                yield batch

    class Counting(DataLoader[int]):
        count = 0

        def __iter__(self) -> Any:
            for batch in super().__iter__():
                Counting.count += 1
                yield batch

    with pytest.raises(DataError, match="overrides how a DataLoader iterates"):
        seen(prepared(Twice(Squares(4), batch_size=2), 0, 2))
    assert [
        row.values for row in seen(prepared(Counting(Squares(8), batch_size=2), 1, 2))
    ] == [[4, 9], [36, 49]]
    assert Counting.count == 2


def test_streams_hear_of_the_epoch_and_have_no_length() -> None:
    data = CountingStream(8)
    loader = prepared(DataLoader(data, batch_size=2))
    with pytest.raises(TypeError, match="no length"):
        len(loader)
    seen(loader)
    seen(loader)
    assert data.epochs == [0, 1]
    assert loader.dataset is data


def test_even_batches_can_be_changed_for_a_block() -> None:
    loaders = [
        prepared(DataLoader(range(5), batch_size=2), rank, 2)  # type: ignore[arg-type]
        for rank in range(2)
    ]
    assert [len(loader) for loader in loaders] == [2, 2]
    with loaders[0].even(False), loaders[1].even(False):
        assert [len(loader) for loader in loaders] == [2, 1]
        assert global_order([seen(loader) for loader in loaders]) == list(range(5))
    assert [len(loader) for loader in loaders] == [2, 2]


def test_two_passes_at_once_are_two_epochs() -> None:
    for user in (
        DataLoader(range(12), batch_size=3, shuffle=True),  # type: ignore[arg-type]
        DataLoader(CountingStream(12), batch_size=3),
    ):
        expected = [seen(prepared(user))]
        second = prepared(user)
        second.set_epoch(1)
        expected.append(seen(second))
        loader = prepared(user)
        earlier_pass, later_pass = iter(loader), iter(loader)
        pairs = [
            (next(earlier_pass).tolist(), next(later_pass).tolist()) for _ in range(4)
        ]
        assert pairs == [(a.values, b.values) for a, b in zip(*expected, strict=True)]
        assert next(earlier_pass, None) is None
        assert (loader.state_dict()["epoch"], loader.state_dict()["consumed"]) == (
            1,
            12,
        )
        assert next(later_pass, None) is None
        assert loader.epoch == 2


def test_settings_changed_after_prepare_act_or_are_refused() -> None:
    for data in (Squares(4), CountingStream(4)):
        loader: Any = prepared(DataLoader(data, batch_size=2))
        loader.collate_fn = collate_list
        assert isinstance(next(iter(loader)), list)
        with pytest.raises(PrepareError, match="before prepare"):
            loader.num_workers = 3


def test_a_loader_left_without_batches_says_why(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level("WARNING"):
        loader = prepared(DataLoader(range(3), batch_size=2, drop_last=True), 0, 2)  # type: ignore[arg-type]
    assert len(loader) == 0
    assert "a step of 2 process(es) needs 4" in caplog.text
