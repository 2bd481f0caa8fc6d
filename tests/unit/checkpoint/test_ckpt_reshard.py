"""Any layout can be read from any other: each element comes from exactly one piece."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from hasten.checkpoint.base import Slice
from hasten.checkpoint.format.formats import Piece
from hasten.checkpoint.reshard import intersect_boxes, join_pieces, plan_copies
from hasten.errors import CorruptCheckpointError, OtherModelError


def boxes(
    shape: tuple[int, ...], cuts: tuple[int, ...]
) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(offset, extent) of a grid of pieces, uneven like torch's chunking: the last ones may be short or empty."""
    per_dim = []
    for total, count in zip(shape, cuts, strict=True):
        step = -(-total // count)
        starts = [min(i * step, total) for i in range(count)]
        per_dim.append([(start, min(start + step, total) - start) for start in starts])
    grid = [tuple(zip(*combo, strict=True)) for combo in itertools.product(*per_dim)]
    return [(offset, extent) for offset, extent in grid]


@pytest.mark.parametrize("shape", [(7,), (8, 5), (4, 6, 3)])
def test_every_layout_reads_every_other_up_to_16_pieces(shape: tuple[int, ...]) -> None:
    full = torch.arange(float(torch.tensor(shape).prod())).reshape(shape)
    counts = (1, 2, 3, 4, 7, 16) if len(shape) == 1 else (1, 2, 4, 5)
    layouts = list(itertools.product(counts, repeat=len(shape)))
    sampled_layouts = layouts if len(shape) < 3 else random.Random(0).sample(layouts, 8)
    for old, new in itertools.product(sampled_layouts, sampled_layouts):
        pieces = [
            Piece(full[_index(o, e)].clone(), shape, o) for o, e in boxes(shape, old)
        ]
        for offset, extent in boxes(shape, new):
            target = torch.full(extent, -1.0)
            for copy in plan_copies("w", Slice(target, shape, offset), pieces):
                copy.target.copy_(copy.source)
            assert torch.equal(target, full[_index(offset, extent)]), (old, new, offset)


def _index(offset: tuple[int, ...], extent: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(o, o + e) for o, e in zip(offset, extent, strict=True))


def test_overlap_is_symmetric_and_exact() -> None:
    rng = random.Random(1)
    for _ in range(2000):
        a, b = ([rng.randrange(6) for _ in range(2)] for _ in range(2))
        n, m = ([rng.randrange(1, 5) for _ in range(2)] for _ in range(2))
        first_cells = {
            (i, j) for i in range(a[0], a[0] + n[0]) for j in range(a[1], a[1] + n[1])
        }
        second_cells = {
            (i, j) for i in range(b[0], b[0] + m[0]) for j in range(b[1], b[1] + m[1])
        }
        overlap = intersect_boxes(a, n, b, m)
        assert overlap == intersect_boxes(b, m, a, n)
        size = 0 if overlap is None else overlap[0][1] * overlap[1][1]
        assert size == len(first_cells & second_cells)


def test_missing_piece_and_wrong_shape_name_the_tensor() -> None:
    half = Piece(torch.zeros(2, 3), (4, 3), (0, 0))
    with pytest.raises(
        CorruptCheckpointError, match=r"layer\.w: the files hold 6 of the 12"
    ):
        plan_copies("layer.w", torch.empty(4, 3), [half])
    with pytest.raises(
        OtherModelError, match=r"layer\.w has shape \(5, 3\) here and \(4, 3\)"
    ):
        plan_copies("layer.w", torch.empty(5, 3), [half])
    halves = [half, Piece(torch.ones(2, 3), (4, 3), (2, 0))]
    assert torch.equal(
        join_pieces(halves, "w"), torch.cat([torch.zeros(2, 3), torch.ones(2, 3)])
    )
