"""Affinity: the plan for any machine, and that it is carried out."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hasten.errors import ConfigError
from hasten.runtime.affinity import (
    AffinityPlan,
    node_of_device,
    numa_nodes,
    parse_cpus,
    plan,
    set_affinity,
)

TWO = {0: frozenset(range(8)), 1: frozenset(range(8, 16))}


def test_cpu_lists() -> None:
    assert parse_cpus("0-2,8\n") == {0, 1, 2, 8}
    assert parse_cpus("\n") == frozenset()
    with pytest.raises(ValueError, match="invalid literal"):
        parse_cpus("a-b")


def test_nodes_and_devices_are_read_from_sys(tmp_path: Path) -> None:
    for name, cpus in (("node0", "0-3"), ("node1", "4-7"), ("node2", "\n")):
        (tmp_path / "devices/system/node" / name).mkdir(parents=True)
        (tmp_path / "devices/system/node" / name / "cpulist").write_text(cpus)
    device = tmp_path / "bus/pci/devices/0000:3b:00.0"
    device.mkdir(parents=True)
    (device / "numa_node").write_text("1\n")
    assert numa_nodes(tmp_path) == {0: {0, 1, 2, 3}, 1: {4, 5, 6, 7}}
    assert node_of_device("0000:3B:00.0", tmp_path) == 1
    assert node_of_device("0000:99:00.0", tmp_path) is None
    (device / "numa_node").write_text("-1\n")
    assert node_of_device("0000:3b:00.0", tmp_path) is None
    assert numa_nodes(tmp_path / "nowhere") == {}


@pytest.mark.parametrize("world", range(1, 17))
@pytest.mark.parametrize("count", [2, 4, 8])
def test_ranks_spread_evenly_over_the_nodes(count: int, world: int) -> None:
    nodes = {number: frozenset({2 * number, 2 * number + 1}) for number in range(count)}
    allowed = frozenset().union(*nodes.values())
    plans = [plan(rank, world, nodes=nodes, allowed=allowed) for rank in range(world)]
    if world == 1:
        assert plans[0].cpus is None
        return
    shares = [sum(p.cpus == cpus for p in plans) for cpus in nodes.values()]
    assert sum(shares) == world
    assert max(shares) - min(shares) <= 1


def test_the_devices_node_wins() -> None:
    chosen = plan(0, 8, nodes=TWO, allowed=frozenset(range(16)), device_node=1)
    assert chosen == AffinityPlan(
        TWO[1], "the cores of NUMA node 1, where the device is"
    )


def test_only_allowed_cores_are_used() -> None:
    assert plan(1, 2, nodes=TWO, allowed=frozenset({0, 9, 10})).cpus == frozenset(
        {9, 10}
    )


@pytest.mark.parametrize(
    ("nodes", "allowed", "device", "reason"),
    [
        ({}, frozenset({0}), None, "does not tell its NUMA nodes"),
        ({0: frozenset({0, 1})}, frozenset({0, 1}), None, "on one NUMA node"),
        (TWO, frozenset({0, 1}), 1, "on one NUMA node"),
        (
            {**TWO, 2: frozenset({16})},
            frozenset(range(16)),
            2,
            "none of the allowed ones is on NUMA node 2",
        ),
    ],
)
def test_leaving_the_cores_alone_has_a_reason(
    nodes: dict[int, frozenset[int]],
    allowed: frozenset[int],
    device: int | None,
    reason: str,
) -> None:
    chosen = plan(0, 2, nodes=nodes, allowed=allowed, device_node=device)
    assert chosen.cpus is None
    assert reason in chosen.reason


def test_device_on_an_unknown_node_is_an_error() -> None:
    with pytest.raises(ConfigError, match="NUMA node 5, but this machine has"):
        plan(0, 2, nodes=TWO, allowed=frozenset(range(16)), device_node=5)


def test_the_plan_is_carried_out() -> None:
    before = os.sched_getaffinity(0)
    try:
        chosen = set_affinity(0, 2)
        assert os.sched_getaffinity(0) == (
            before if chosen.cpus is None else chosen.cpus
        )
        assert chosen.reason
    finally:
        os.sched_setaffinity(0, before)
