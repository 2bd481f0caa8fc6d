"""How sequences lie on ranks: each token once, equal work under a causal mask, and lengths that would fit."""

from __future__ import annotations

import itertools

import pytest

from hasten.errors import ConfigError
from hasten.strategies.context.sequence_plan import SequenceLayout

LAYOUTS = [
    SequenceLayout(ranks, balanced)
    for ranks in range(1, 17)
    for balanced in (False, True)
]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_position_lies_on_one_rank(layout: SequenceLayout) -> None:
    length = 3 * layout.num_chunks
    positions_by_rank = [
        layout.positions_of(rank, length) for rank in range(layout.ranks)
    ]
    assert sorted(
        position for rank_positions in positions_by_rank for position in rank_positions
    ) == list(range(length))
    joined = [chunk for rank in range(layout.ranks) for chunk in layout.chunks_of(rank)]
    assert [joined[chunk_index] for chunk_index in layout.chunk_order()] == list(
        range(layout.num_chunks)
    )


@pytest.mark.parametrize("ranks", range(2, 17))
def test_balanced_ranks_have_equal_work(ranks: int) -> None:
    """A chunk of queries attends to its chunk of keys and to those before it."""

    def work(layout: SequenceLayout) -> list[int]:
        return [
            sum(chunk + 1 for chunk in layout.chunks_of(rank)) for rank in range(ranks)
        ]

    assert len(set(work(SequenceLayout(ranks, balanced=True)))) == 1
    uneven = work(SequenceLayout(ranks, balanced=False))
    assert max(uneven) == ranks * min(uneven)


def test_the_positions_of_every_balanced_rank_jump() -> None:
    for ranks in range(2, 17):
        layout = SequenceLayout(ranks, balanced=True)
        for rank in range(ranks):
            positions = layout.positions_of(rank, 4 * ranks)
            assert any(
                following != position + 1
                for position, following in itertools.pairwise(positions)
            )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_lengths_that_do_not_divide_are_refused_with_one_that_does(
    layout: SequenceLayout,
) -> None:
    for length in range(1, 70):
        if length % layout.num_chunks == 0:
            layout.check(length, "it")
            continue
        with pytest.raises(
            ConfigError, match=rf"it has {length} positions .*Pad sequences to (\d+)"
        ) as refusal:
            layout.check(length, "it")
        words = str(refusal.value)
        padded = int(words.split("Pad sequences to ")[1].split(",")[0])
        layout.check(padded, "it")
        assert length < padded < length + layout.num_chunks
        for size in words.split("one of [")[1].split("]")[0].split(", "):
            SequenceLayout(int(size), layout.balanced).check(length, "it")
