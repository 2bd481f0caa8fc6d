"""Edge cases with a clear answer: nothing to read, too little to read, workers that fail."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from torch.utils.data import DataLoader, Dataset, IterableDataset

from tests.support.loaders import CountingStream, global_order, prepared, seen


class FaultyDataset(Dataset[int]):
    """Fails at one index."""

    def __init__(self, bad: int = -1) -> None:
        self.bad = bad

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> int:
        if index == self.bad:
            raise LookupError("cannot read this one")
        return index


def test_an_empty_dataset_is_an_epoch_without_batches() -> None:
    for world, drop_last, even in itertools.product(
        (1, 2, 4), (False, True), (False, True)
    ):
        for rank in range(world):
            loader = prepared(
                DataLoader([], drop_last=drop_last),  # type: ignore[arg-type]
                rank,
                world,
                even_batches=even,
            )
            assert len(loader) == 0
            assert seen(loader) == []
            assert loader.epoch == 1
            assert (
                seen(prepared(DataLoader(CountingStream(0), batch_size=2), rank, world))
                == []
            )


def test_a_dataset_smaller_than_the_world() -> None:
    def shares(**settings: bool) -> list[list[object]]:
        loaders = [
            prepared(DataLoader(range(3), batch_size=4), rank, 5, **settings)  # type: ignore[arg-type]
            for rank in range(5)
        ]
        return [list(map(tuple, seen(loader))) for loader in loaders]

    assert shares() == [
        [([0], 1, True)],
        [([1], 1, True)],
        [([2], 1, True)],
        [([0], 0, True)],
        [([1], 0, True)],
    ]
    assert shares(even_batches=False) == [
        [([0], 1, True)],
        [([1], 1, True)],
        [([2], 1, True)],
        [],
        [],
    ]


def test_an_error_of_the_dataset_keeps_its_type_and_names_rank_batch_and_index() -> (
    None
):
    for num_workers in (0, 1):
        loader = prepared(
            DataLoader(FaultyDataset(bad=7), batch_size=2, num_workers=num_workers),
            1,
            2,
        )
        with pytest.raises(LookupError) as caught:
            seen(loader)
        error_text = "\n".join([str(caught.value), *caught.value.__notes__])
        assert "cannot read this one" in error_text
        assert "rank 1, epoch 0, batch 1 after position 0" in error_text
        assert "[6, 7]" in error_text
        if num_workers:
            assert "raised by the dataset at index 7" in error_text
            assert "Traceback" in error_text  # the worker's own


def test_an_error_of_a_stream_names_the_rank_and_the_batch() -> None:
    class BreakingStream(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            yield from range(6)
            raise OSError("the file ended")

    loader = prepared(DataLoader(BreakingStream(), batch_size=2), 0, 1)
    with pytest.raises(OSError, match="the file ended") as caught:
        seen(loader)
    assert "rank 0, epoch 0, batch 3" in caught.value.__notes__[0]


def test_a_loader_goes_on_after_a_break_and_after_an_error() -> None:
    loader = prepared(
        DataLoader(
            FaultyDataset(), batch_size=2, num_workers=2, persistent_workers=True
        )
    )
    for limit in (1, 3, None):
        rows = seen(loader, limit)
        assert global_order([rows]) == list(range(12))[: 2 * (limit or 6)]
    data = FaultyDataset(bad=4)
    loader = prepared(DataLoader(data, batch_size=2))
    with pytest.raises(LookupError):
        seen(loader)
    data.bad = -1
    assert global_order([seen(loader)]) == list(range(12))
