"""Laws of the account of samples: whatever members are lost, each position of an epoch is used exactly once."""

from __future__ import annotations

import json
import random

import pytest

from hasten.extensions.survive.ledger_plan import (
    Ledger,
    list_positions,
    merge_ranges,
    rank_positions,
)


def test_each_position_is_used_once_with_members_that_change_at_random() -> None:
    for seed in range(300):
        rng = random.Random(seed)
        names = [str(number) for number in range(rng.randint(1, 8))]
        ledger = Ledger(rng.randint(1, 200), rng.randint(1, 7), members=tuple(names))
        used: list[int] = []
        while not ledger.exhausted:
            for _ in range(rng.randint(1, 3)):
                if not ledger.exhausted:
                    ledger.deal_batches()
            members = ledger.members
            contributors = [name for name in members if rng.random() < 0.7] or [
                rng.choice(members)
            ]
            for round_ranges in ledger.rounds:
                used += [
                    position
                    for name in contributors
                    for position in list_positions(round_ranges[name])
                ]
            newcomers = [
                name
                for name in names
                if name not in contributors and rng.random() < 0.5
            ]
            ledger.commit_update(contributors, [*contributors, *newcomers])
            # as a healed replica receives it
            ledger = Ledger.from_json(json.loads(json.dumps(ledger.to_json())))
        assert sorted(used) == list(range(ledger.size)), seed
        ledger.begin_epoch(1)
        assert ledger.unused == {}


def test_replicas_get_consecutive_batches_and_share_a_short_end_equally() -> None:
    ledger = Ledger(17, 4, members=("a", "b", "c"))
    assert ledger.deal_batches() == {"a": [(0, 4)], "b": [(4, 8)], "c": [(8, 12)]}
    assert ledger.deal_batches() == {"a": [(12, 14)], "b": [(14, 16)], "c": [(16, 17)]}
    assert ledger.exhausted
    assert ledger.count_batches("c") == (2, 2)


def test_samples_of_a_lost_replica_are_given_out_first() -> None:
    ledger = Ledger(100, 5, members=("a", "b", "c"))
    ledger.deal_batches()
    assert ledger.commit_update(["a", "c"], ["a", "c"]) == [(5, 10)]
    assert ledger.deal_batches() == {"a": [(5, 10)], "c": [(15, 20)]}


def test_replicas_without_samples_at_the_end_are_told_so() -> None:
    ledger = Ledger(2, 5, members=("a", "b", "c"))
    assert ledger.deal_batches() == {"a": [(0, 1)], "b": [(1, 2)], "c": []}
    assert ledger.count_batches("c") == (1, 0)


def test_histories_differ_when_members_or_samples_do() -> None:
    lineages = set()
    for contributors in (["a", "b"], ["a"], ["b"]):
        ledger = Ledger(100, 5, members=("a", "b"))
        ledger.deal_batches()
        ledger.commit_update(contributors, contributors)
        lineages.add(ledger.lineage)
    assert len(lineages) == 3


def test_a_loop_that_ends_early_is_reported_with_its_unused_samples() -> None:
    ledger = Ledger(20, 5, members=("a", "b"))
    ledger.deal_batches()
    ledger.commit_update(["a"], ["a"])
    ledger.begin_epoch(1)
    assert ledger.unused == {0: [(5, 20)]}


@pytest.mark.parametrize(("size", "unused"), [(20, {}), (23, {0: [(20, 23)]})])
def test_drop_last_leaves_a_short_end_out(
    size: int, unused: dict[int, list[tuple[int, int]]]
) -> None:
    ledger = Ledger(size, 5, drop_last=True, members=("a", "b"))
    while not ledger.exhausted:
        ledger.deal_batches()
        ledger.commit_update(["a", "b"], ["a", "b"])
    ledger.begin_epoch(1)
    assert ledger.unused == unused


def test_a_preview_is_what_members_get_while_they_stay_the_same() -> None:
    ledger = Ledger(50, 4, members=("a", "b", "c"), returned=[(3, 9)], following=20)
    last_flags = []
    for ranges, last in ledger.preview_batches("b"):
        assert ledger.deal_batches()["b"] == ranges
        ledger.commit_update(ledger.members, ledger.members)
        last_flags.append(last)
    assert ledger.exhausted
    assert last_flags == [False, False, True]


def test_ranges_are_joined() -> None:
    assert merge_ranges([(5, 7), (0, 2), (2, 5), (9, 9)]) == [(0, 7)]


def test_the_ranks_of_a_replica_share_its_positions() -> None:
    rng = random.Random(5)
    for num_ranks in range(1, 17):
        for _ in range(40):
            positions = sorted(rng.sample(range(200), rng.randint(0, 4 * num_ranks)))
            ranges = merge_ranges((position, position + 1) for position in positions)
            positions_by_rank = [
                list_positions(rank_positions(ranges, rank, num_ranks))
                for rank in range(num_ranks)
            ]
            assert [
                position
                for positions_of_rank in positions_by_rank
                for position in positions_of_rank
            ] == positions
            assert {
                len(positions_of_rank) for positions_of_rank in positions_by_rank
            } <= {
                len(positions) // num_ranks,
                -(-len(positions) // num_ranks),
            }


def test_batches_are_counted_for_each_rank_of_a_replica() -> None:
    ledger = Ledger(19, 4, members=("a", "b"))
    ledger.deal_batches()
    ledger.deal_batches()
    ledger.deal_batches()  # two samples for the first replica, one for the second
    assert ledger.count_batches("a", 2) == (6, 6)
    assert ledger.count_batches("b", 2) == (6, 5)
    assert ledger.count_batches("b") == (3, 3)


def test_a_ledger_begins_with_nothing() -> None:
    ledger = Ledger(10, 2)
    assert ledger.to_json() == {
        "size": 10,
        "rows": 2,
        "drop_last": False,
        "seed": 0,
        "step": 0,
        "lineage": "",
        "epoch": 0,
        "members": (),
        "following": 0,
        "returned": [],
        "rounds": [],
        "unused": {},
    }
    ledger.begin_epoch(1)
    assert ledger.unused == {}, "an epoch that nobody began has no unused samples"
    assert (ledger.epoch, ledger.following) == (1, 0)


def test_an_epoch_that_was_begun_is_reported_from_its_first_sample_on() -> None:
    ledger = Ledger(4, 1, members=("a",))
    assert ledger.deal_batches() == {"a": [(0, 1)]}
    ledger.begin_epoch(1)
    assert ledger.unused == {0: [(0, 4)]}
    assert Ledger.from_json(json.loads(json.dumps(ledger.to_json()))) == ledger
    assert list(ledger.to_json()["unused"]) == ["0"]
    assert ledger.deal_batches() == {"a": [(0, 1)]}


def test_returned_samples_stay_in_order() -> None:
    ledger = Ledger(20, 3, members=("a",), returned=[(0, 5), (8, 11)], following=12)
    assert ledger.deal_batches() == {"a": [(0, 3)]}
    assert ledger.returned == [(3, 5), (8, 11)]
    assert ledger.deal_batches() == {"a": [(3, 5), (8, 9)]}
    assert ledger.returned == [(9, 11)]
    assert ledger.deal_batches() == {"a": [(9, 11), (12, 13)]}
    assert ledger.returned == []
    ledger.returned = [(13, 16)]
    assert ledger.deal_batches() == {"a": [(13, 16)]}
    assert ledger.returned == []


@pytest.mark.parametrize(
    ("left", "members", "exhausted"),
    [
        (5, 2, True),
        (6, 2, False),
        (2, 1, True),
        (3, 1, False),
        (2, 0, True),
        (3, 0, False),
    ],
)
def test_drop_last_needs_a_batch_for_each_member(
    left: int, members: int, exhausted: bool
) -> None:
    names = tuple("ab"[:members])
    assert Ledger(left, 3, drop_last=True, members=names).exhausted is exhausted
    assert not Ledger(left, 3, members=names).exhausted


def test_the_digest_of_a_history_is_frozen_because_replicas_compare_it() -> None:
    ledger = Ledger(100, 5, members=("a", "b"))
    ledger.deal_batches()
    ledger.commit_update(["b", "a"], ["c", "a"])
    assert (ledger.step, ledger.members) == (1, ("a", "c"))
    assert ledger.lineage == "5da12f344b48ce17"
    ledger.deal_batches()
    ledger.commit_update(["a"], ["a"])
    assert ledger.step == 2


def test_ranges_of_ranks_are_never_empty() -> None:
    for num_ranks in range(1, 5):
        for rank in range(num_ranks):
            ranges = rank_positions([(0, 1), (3, 5), (9, 12)], rank, num_ranks)
            assert all(start < end for start, end in ranges)
