"""Roles of a quorum's members: the newest state wins, and every member computes the same division."""

from __future__ import annotations

import itertools

from hasten.extensions.survive.roles_plan import Member, Roles, divide_members


def member(name: str, step: int = 7, lineage: str = "x", fresh: bool = False) -> Member:
    return Member(name, step, lineage, fresh, f"{name}:1", f"{name}:2")


def division(*members: Member) -> tuple[list[str], list[tuple[str, str]]]:
    """Return the active names and the pairs of healed and healing names, after a check that the order does not matter."""
    roles = {
        _names(divide_members(several)) for several in itertools.permutations(members)
    }
    assert len(roles) == 1
    active, pairs = roles.pop()
    return list(active), list(pairs)


def _names(roles: Roles) -> tuple[tuple[str, ...], tuple[tuple[str, str], ...]]:
    return tuple(member.name for member in roles.active), tuple(
        (member.name, source.name) for member, source in roles.healing
    )


def test_equal_replicas_are_all_active() -> None:
    assert division(member("c"), member("a"), member("b")) == (["a", "b", "c"], [])


def test_replicas_that_are_behind_are_healed_by_the_others_in_turn() -> None:
    members = member("a", 6), member("b"), member("c"), member("d", 3), member("e", 5)
    assert division(*members) == (["b", "c"], [("a", "b"), ("d", "c"), ("e", "b")])


def test_a_new_replica_is_healed_even_if_its_checkpoint_claims_more_updates() -> None:
    assert division(member("a", 900, fresh=True), member("b", 7)) == (
        ["b"],
        [("a", "b")],
    )


def test_a_run_starts_with_the_state_of_the_first_or_of_the_newest_checkpoint() -> None:
    assert division(member("a", 0, "", True), member("b", 0, "", True)) == (
        ["a"],
        [("b", "a")],
    )
    assert division(member("a", 0, "", True), member("b", 9, "y", True)) == (
        ["b"],
        [("a", "b")],
    )


def test_of_two_histories_of_equal_length_the_one_of_most_members_wins() -> None:
    members = member("a", 7, "alone"), member("b"), member("c")
    assert division(*members) == (["b", "c"], [("a", "b")])
    assert division(member("a", 7, "p"), member("b", 7, "q")) == (["a"], [("b", "a")])


def test_names_of_all_members_after_healing() -> None:
    roles = divide_members([member("b"), member("a", 3)])
    assert roles.names == ("a", "b")
    assert roles.source_of("a").name == "b"
    assert [healed.name for healed in roles.healed_by("b")] == ["a"]
    assert not roles.is_active("a")
    assert roles.is_active("b") is True
    assert roles.contributors == ("b",)
    assert divide_members([member("b"), member("a")]).contributors == ("a", "b")
