"""Process helpers on real ranks: roles, order, shares, triggers; an error on one rank leaves nobody waiting."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Subset, TensorDataset

from hasten.accelerator.process import Process, share_bounds, take_share
from hasten.errors import CommError, DataError, PeerFailedError
from hasten.runtime.context import ProcessContext
from hasten.testing.pool import ranks


@ranks(1, 2, 4)
def test_roles(ctx: ProcessContext) -> None:
    process = Process(ctx)
    assert (process.num_processes, process.process_index) == (ctx.world.size, ctx.rank)
    assert process.is_main_process == (ctx.rank == 0)
    assert process.is_last_process == (ctx.rank == ctx.world.size - 1)
    assert process.device == torch.device("cpu")
    ran = [
        process.on_main_process(lambda: "main")(),
        process.on_last_process(lambda: "last")(),
        process.on_process(process_index=0)(lambda: "zero")(),
    ]
    expected = [
        "main" if ctx.rank == 0 else None,
        "last" if process.is_last_process else None,
    ]
    assert ran == [*expected, "zero" if ctx.rank == 0 else None]
    process.wait_for_everyone()


@ranks(2, 4)
def test_main_process_goes_first(ctx: ProcessContext, tmp_path: Path) -> None:
    process = Process(ctx)
    for number, first in enumerate(
        (process.main_process_first, process.local_main_process_first)
    ):
        marker = tmp_path / f"made-{number}"
        with first():
            if process.is_main_process:
                assert not marker.exists()
                marker.write_text("by main")
            assert marker.read_text() == "by main"


@ranks(2, 3)
@pytest.mark.parametrize("failing", [0, 1])
def test_an_error_inside_leaves_nobody_waiting(
    ctx: ProcessContext, failing: int
) -> None:
    process = Process(ctx)
    expected: type[Exception] = KeyError if ctx.rank == failing else PeerFailedError
    with pytest.raises(expected), process.main_process_first():
        fail_if(ctx.rank == failing)
    process.wait_for_everyone()  # and the group is still usable


@ranks(2, 3)
def test_blocks_nest_when_they_are_of_one_kind(ctx: ProcessContext) -> None:
    process = Process(ctx)
    with process.main_process_first(), process.main_process_first():
        pass
    with pytest.raises((CommError, PeerFailedError)), process.main_process_first():
        process.local_main_process_first().__enter__()
    process.wait_for_everyone()


def fail_if(is_failing: bool) -> None:
    if is_failing:
        raise KeyError("bad data")


@ranks(2, 4)
def test_trigger_set_anywhere_is_seen_everywhere_once(ctx: ProcessContext) -> None:
    process = Process(ctx)
    assert not process.check_trigger()
    if process.is_last_process:
        process.set_trigger()
    assert process.check_trigger()
    assert not process.check_trigger()


def containers(length: int) -> list[Any]:
    numbers = list(range(length))
    return [
        numbers,
        tuple(numbers),
        torch.arange(length),
        {"a": numbers, "b": torch.arange(length)},
    ]


def as_list(share: Any) -> list[int]:
    if isinstance(share, dict):
        assert as_list(share["a"]) == as_list(share["b"])
        return as_list(share["a"])
    return [int(x) for x in share]


def test_shares_partition_in_order_for_every_length_and_world() -> None:
    for shares in range(1, 17):
        for length in range(40):
            cuts = [share_bounds(length, index, shares) for index in range(shares)]
            assert cuts[0][0] == 0
            assert cuts[-1][1] == length
            assert all(a[1] == b[0] for a, b in pairwise(cuts))
            sizes = [end - start for start, end in cuts]
            assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("shares", [1, 2, 3, 4, 7])
def test_shares_of_every_container(shares: int) -> None:
    for length in (0, 1, 2, 5, 12):
        for inputs in containers(length):
            all_shares = [take_share(inputs, index, shares) for index in range(shares)]
            assert all(type(share) is type(inputs) for share in all_shares)
            assert [x for share in all_shares for x in as_list(share)] == list(
                range(length)
            )
            padded = [
                as_list(take_share(inputs, index, shares, apply_padding=True))
                for index in range(shares)
            ]
            assert len({len(share) for share in padded}) == 1
            assert {x for share in padded for x in share} == set(range(length))


def test_shares_of_datasets_and_bad_dicts() -> None:
    dataset = TensorDataset(torch.arange(5))
    subsets: Sequence[Subset[Any]] = [
        take_share(dataset, index, 2) for index in range(2)
    ]
    assert [
        int(subset[i][0]) for subset in subsets for i in range(len(subset))
    ] == list(range(5))
    with pytest.raises(DataError, match=r"differ in length: \{'a': 1, 'b': 2\}"):
        take_share({"a": [1], "b": [1, 2]}, 0, 2)
