"""Policies of prepared loaders: pad="full" gives whole batches, order="torch" the order of a plain DataLoader."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from hasten.comm.local import LocalComm
from hasten.data.batch_plan import plan_rows
from hasten.data.dispatch import BatchReader
from hasten.data.loader import Loader
from hasten.data.position import Position
from hasten.data.skipping import skip_first_batches
from hasten.data.stream import StreamSource
from hasten.data.stream_shard import Cutting
from hasten.errors import DataError
from tests.support.loaders import CountingStream, global_order, prepared, seen


class Buckets:
    """A batch sampler of one's own, with a batch size and a short last batch."""

    def __init__(self, size: int, batch_size: int) -> None:
        self.size, self.batch_size = size, batch_size

    def __len__(self) -> int:
        return -(-self.size // self.batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        return iter(BatchSampler(range(self.size), self.batch_size, False))


def plain(size: int, batch: int) -> DataLoader[Any]:
    return DataLoader(range(size), batch_size=batch)  # type: ignore[arg-type]


def shuffled(size: int, batch: int) -> DataLoader[Any]:
    return DataLoader(range(size), batch_size=batch, shuffle=True)  # type: ignore[arg-type]


def drawn(size: int, batch: int) -> DataLoader[Any]:
    return DataLoader(
        range(size),  # type: ignore[arg-type]
        batch_size=batch,
        sampler=SubsetRandomSampler(range(size)),
    )


def bucketed(size: int, batch: int) -> DataLoader[Any]:
    return DataLoader(range(size), batch_sampler=Buckets(size, batch))  # type: ignore[arg-type]


def stream(size: int, batch: int) -> DataLoader[Any]:
    return DataLoader(CountingStream(size), batch_size=batch)


def test_a_full_plan_gives_whole_shares_and_every_unit_once() -> None:
    for size, batch, world, even in itertools.product(
        range(1, 40), range(1, 6), range(1, 6), (True, False)
    ):
        order: list[int] = []
        for shard in range(world):
            plan = plan_rows(
                batch_size=batch,
                num_shards=world,
                shard=shard,
                split=False,
                dispatch=False,
                drop_last=False,
                even=even,
                pad="full",
            )
            *_, last = [
                row for chunk in plan.assign(size) for row in chunk.tolist()
            ] or [[]]
            if even:
                assert plan.steps(size) == -(-size // (batch * world))
                assert len(last) == batch
            tail = plan.tail(size)
            order += [] if tail is None else range(tail.first, tail.first + tail.real)
            assert tail is None or last == [
                place % size for place in range(tail.first, tail.first + tail.rows)
            ]
        assert order == list(range(size - size % (batch * world), size))


@pytest.mark.parametrize("build", [plain, shuffled, drawn, bucketed, stream])
@pytest.mark.parametrize("split", [False, True])
def test_full_padding_gives_every_rank_whole_batches(
    build: Callable[[int, int], DataLoader[Any]], split: bool
) -> None:
    for size, world in itertools.product((1, 2, 5, 12, 17, 24), (1, 2, 4)):
        rows = 4 // world if split else 4
        shares = [
            seen(prepared(build(size, 4), rank, world, pad="full", split_batches=split))
            for rank in range(world)
        ]
        assert {len(batch.values) for share in shares for batch in share} == {rows}
        assert {len(share) for share in shares} == {-(-size // (rows * world))}
        assert sorted(global_order(shares)) == list(range(size))
        assert all(
            batch.last == (number == len(share))
            for share in shares
            for number, batch in enumerate(share, 1)
        )
        padding = [
            row for share in shares for row in share[-1].values[share[-1].real :]
        ]
        if build is not stream:  # ranks of a stream keep its first elements only
            epoch = global_order(shares)
            assert padding == [epoch[place % size] for place in range(len(padding))]


@pytest.mark.parametrize("build", [plain, bucketed, stream])
def test_full_padding_when_one_rank_reads_for_all(
    build: Callable[[int, int], DataLoader[Any]],
) -> None:
    for size in (1, 5, 12):
        for options in (
            {},
            {"split_batches": True},
            {"slice_fn": lambda batch, rows, rank, world: batch[rows]},
        ):
            share = seen(
                prepared(build(size, 4), pad="full", dispatch_batches=True, **options)
            )
            assert [len(batch.values) for batch in share] == [4] * -(-size // 4)
            assert sorted(global_order([share])) == list(range(size))


def test_a_first_batch_that_is_too_short_pads_all_the_same() -> None:
    source = StreamSource(
        stream(1, 4),
        Cutting(1, 0, 4, True, False, True),
        CountingStream(1),
        LocalComm(),
        0,
    )
    reader = BatchReader(
        4, False, True, False, lambda batch, rows, rank, world: batch[rows]
    )
    (step,) = reader.rounds(source, Position())
    assert [None if item is None else item[0].tolist() for item in step.items] == [
        [0]
    ] * 4


class Noisy(Dataset[torch.Tensor]):
    """Draws from torch's generator whenever a sample is read."""

    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(index), torch.rand(()).item()])


class Lazy(Sampler[int]):
    """Draws each index from torch's generator when it is asked for."""

    def __len__(self) -> int:
        return 23

    def __iter__(self) -> Iterator[int]:
        return (int(torch.randint(23, ())) for _ in range(23))


KINDS: dict[str, Callable[[], dict[str, Any]]] = {
    "shuffle": lambda: {"shuffle": True},
    "generator": lambda: {
        "shuffle": True,
        "generator": torch.Generator().manual_seed(3),
    },
    "replacement": lambda: {"sampler": RandomSampler(Noisy(), replacement=True)},
    "weighted": lambda: {"sampler": WeightedRandomSampler([1.0] * 23, 23)},
    "batches": lambda: {
        "batch_size": 1,
        "batch_sampler": BatchSampler(SubsetRandomSampler(range(23)), 3, True),
    },
    "lazy": lambda: {"sampler": Lazy()},
}


def noisy(kind: str) -> DataLoader[Any]:
    return DataLoader(Noisy(), **{"batch_size": 4, **KINDS[kind]()})


def training(batches: Any, stop: int | None = None) -> list[Any]:
    """Two epochs of a loop that draws from torch's generator itself, as dropout does."""
    out = []
    for _ in range(2):
        for number, batch in enumerate(batches, 1):
            out.append([batch.tolist(), torch.rand(()).item()])
            if number == stop:
                break
    return [*out, torch.rand(()).item()]


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_torchs_order_is_that_of_the_plain_loader_draw_by_draw(kind: str) -> None:
    torch.manual_seed(11)
    expected = training(noisy(kind))
    torch.manual_seed(11)
    loader = prepared(noisy(kind), order="torch")
    assert training(loader) == expected
    assert training(loader, stop=2) != expected  # a later epoch is another one


@pytest.mark.parametrize("kind", sorted(set(KINDS) - {"lazy"}))
@pytest.mark.parametrize("after", [0, 1, 3])
def test_torchs_order_resumes_bitwise(kind: str, after: int) -> None:
    torch.manual_seed(11)
    loader = prepared(noisy(kind), order="torch")
    list(loader)
    batches = iter(loader) if after else iter(())
    for _ in range(after):
        next(batches)
    state, rng = json.loads(json.dumps(loader.state_dict())), torch.get_rng_state()
    rest = [batch.tolist() for batch in (batches if after else loader)]
    following = [batch.tolist() for batch in loader]
    torch.manual_seed(99)
    again = prepared(noisy(kind), order="torch", seed=99)
    again.load_state_dict(state)
    torch.set_rng_state(rng)
    assert [batch.tolist() for batch in again] == rest
    assert [batch.tolist() for batch in again] == following


@pytest.mark.parametrize("back", [False, True], ids=["another_run", "the_same_run"])
@pytest.mark.parametrize("epochs", [0, 1])
@pytest.mark.parametrize("kind", ["shuffle", "generator"])
def test_torchs_order_resumes_bitwise_between_epochs_of_persistent_workers(
    kind: str, epochs: int, back: bool
) -> None:
    """torch draws a seed when it starts them, which a resumed run does at another epoch, and a run that goes back not again."""

    def made(seed: int) -> Loader:
        torch.manual_seed(seed)
        user = DataLoader(
            Noisy(),
            batch_size=4,
            num_workers=1,
            persistent_workers=True,
            **KINDS[kind](),
        )
        return prepared(user, order="torch", seed=seed)

    loader = made(11)
    for _ in range(epochs):
        list(loader)
    state, rng = json.loads(json.dumps(loader.state_dict())), torch.get_rng_state()
    following = [[batch.tolist() for batch in loader] for _ in range(2)]
    again = loader if back else made(99)
    again.load_state_dict(state)
    assert again.state_dict() == state, "saved again before it is used"
    torch.set_rng_state(rng)
    assert [[batch.tolist() for batch in again] for _ in range(2)] == following


def test_a_pass_over_torchs_order_knows_its_end() -> None:
    torch.manual_seed(11)
    shares = [
        [*seen(prepared(shuffled(size, 4), order="torch"))] for size in (1, 4, 9, 12)
    ]
    assert all(
        [batch.last for batch in share] == [False] * (len(share) - 1) + [True]
        for share in shares
    )
    assert all(batch.real == len(batch.values) for share in shares for batch in share)


def test_an_order_of_torchs_that_cannot_be_drawn_again_is_refused() -> None:
    torch.manual_seed(11)
    loader = prepared(noisy("lazy"), order="torch")
    batches = iter(loader)
    next(batches), next(batches)
    again = prepared(noisy("lazy"), order="torch")
    again.load_state_dict(json.loads(json.dumps(loader.state_dict())))
    with pytest.raises(DataError, match="Lazy drew a different order for epoch 0"):
        next(iter(again))


def test_an_unbatched_stream_is_skipped_by_reading_past() -> None:
    stream = DataLoader(CountingStream(6), batch_size=None)
    assert list(skip_first_batches(stream, 2)) == [2, 3, 4, 5]
