"""The placement solver against brute force, on random trees with shared tensors, limits and parts that stay whole."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence

import pytest

from hasten.errors import ConfigError
from hasten.extensions.bigmodel.placement_plan import (
    STREAMED_AT_ONCE,
    Device,
    ModuleGroup,
    Node,
    balance_limits,
    group_modules,
    place_modules,
)


def random_tree(
    rng: random.Random,
    depth: int = 0,
    prefix: str = "m",
    pool: list[tuple[int, int]] | None = None,
) -> Node:
    pool = [] if pool is None else pool
    if depth < 3 and rng.random() < 0.6:
        children = tuple(
            random_tree(rng, depth + 1, f"{prefix}.{i}", pool)
            for i in range(rng.randint(1, 3))
        )
        tensors = frozenset(
            itertools.chain.from_iterable(child.tensors for child in children)
        )
        return Node(prefix, tensors, children if rng.random() < 0.7 else ())
    if pool and rng.random() < 0.2:
        shared = rng.choice(pool)
    else:
        shared = (len(pool), rng.randint(1, 20))
        pool.append(shared)
    return Node(prefix, frozenset([shared]))


def leaves(node: Node) -> Iterator[Node]:
    if node.parts:
        for child in node.parts:
            yield from leaves(child)
    else:
        yield node


def ordered_ways(
    groups: Sequence[ModuleGroup], limits: Sequence[int | None]
) -> Iterator[tuple[int, ...]]:
    """Every assignment of parts to devices that keeps the model's order and the limits."""
    for cuts in itertools.combinations_with_replacement(
        range(len(groups) + 1), len(limits) - 1
    ):
        bounds = [0, *cuts, len(groups)]
        counts = tuple(b - a for a, b in itertools.pairwise(bounds))
        sizes = [
            sum(group.num_bytes for group in groups[a:b])
            for a, b in itertools.pairwise(bounds)
        ]
        if all(
            limit is None or size <= limit
            for size, limit in zip(sizes, limits, strict=True)
        ):
            yield counts


@pytest.mark.parametrize("start", range(0, 300, 100))
def test_atoms_cover_every_leaf_once_and_keep_shared_tensors_together(
    start: int,
) -> None:
    for seed in range(start, start + 100):
        node = random_tree(random.Random(seed))
        groups = group_modules([node])
        names = [name for atom in groups for name in atom.names]
        leaf_names = [leaf.name for leaf in leaves(node)]
        assert sorted(names) == sorted(leaf_names)
        holders: dict[int, set[int]] = {}
        for number, atom in enumerate(groups):
            inside = {
                t
                for leaf in leaves(node)
                if leaf.name in atom.names
                for t in leaf.tensors
            }
            assert sum(size for _, size in inside) == atom.num_bytes
            for identity, _ in inside:
                holders.setdefault(identity, set()).add(number)
        assert all(len(numbers) == 1 for numbers in holders.values())
        firsts = [min(leaf_names.index(name) for name in atom.names) for atom in groups]
        assert firsts == sorted(firsts)


@pytest.mark.parametrize("start", range(0, 300, 100))
def test_placement_is_the_best_of_all_that_keep_the_order(start: int) -> None:
    """Most parts on the first device, then on the second, and so on; impossible only when every way is."""
    for seed in range(start, start + 100):
        rng = random.Random(1000 + seed)
        groups = group_modules([random_tree(rng)])
        total = sum(group.num_bytes for group in groups)
        devices = [
            Device(index, rng.randint(0, total)) for index in range(rng.randint(1, 3))
        ]
        if rng.random() < 0.7:
            devices.append(
                Device("cpu", rng.choice([None, rng.randint(0, total)]), offload=True)
            )
        limits = [device.limit for device in devices]
        try:
            result = place_modules(groups, devices)
        except ConfigError:
            reserves = {STREAMED_AT_ONCE * group.num_bytes for group in groups} | {0}
            assert any(
                not list(
                    ordered_ways(
                        groups, [max((limits[0] or 0) - reserve, 0), *limits[1:]]
                    )
                )
                for reserve in reserves
            )
            continue
        index = {device.key: number for number, device in enumerate(devices)}
        device_indices = [index[result.places[group.names[0]]] for group in groups]
        assert device_indices == sorted(device_indices)
        assert all(
            result.places[name] == result.places[group.names[0]]
            for group in groups
            for name in group.names
        )
        spilled = [
            group.num_bytes
            for group, device_index in zip(groups, device_indices, strict=True)
            if devices[device_index].offload
        ]
        assert result.reserved >= STREAMED_AT_ONCE * max(spilled, default=0)
        assert (result.reserved > 0) == bool(spilled)
        free = [max((limits[0] or 0) - result.reserved, 0), *limits[1:]]
        best = max(ordered_ways(groups, free))
        assert (
            tuple(device_indices.count(number) for number in range(len(devices)))
            == best
        )


def heaviest(groups: Sequence[ModuleGroup], counts: tuple[int, ...]) -> int:
    bounds = list(itertools.accumulate(counts))
    return max(
        sum(p.num_bytes for p in groups[a:b])
        for a, b in zip([0, *bounds], bounds, strict=False)
    )


@pytest.mark.parametrize("start", range(0, 200, 100))
def test_balanced_limits_are_the_smallest_that_hold_the_model(start: int) -> None:
    for seed in range(start, start + 100):
        rng = random.Random(seed)
        groups = [
            ModuleGroup((f"p{i}",), rng.randint(1, 9)) for i in range(rng.randint(1, 8))
        ]
        limits = [rng.randint(5, 60) for _ in range(rng.randint(2, 4))]
        balanced = balance_limits(groups, limits)
        ways = list(ordered_ways(groups, limits))
        if not ways:
            assert balanced == limits
            continue
        best = min(heaviest(groups, counts) for counts in ways)
        assert max(min(limit, best) for limit in limits) >= max(
            balanced[:-1], default=0
        )
        assert list(ordered_ways(groups, [min(limit, best) for limit in limits]))
        assert balanced[-1] == limits[-1]


def test_low_first_leaves_the_first_device_what_the_others_cannot_hold() -> None:
    groups = [ModuleGroup((f"p{i}",), 10) for i in range(6)]
    assert balance_limits(groups, [100, 30, 30], low_first=True)[0] == 0
    assert balance_limits(groups, [100, 20, 20], low_first=True)[0] == 20


def test_what_is_missing_is_said() -> None:
    with pytest.raises(
        ConfigError, match=r"8 bytes of it do not fit .* largest, b, takes 8 bytes"
    ):
        place_modules(
            [ModuleGroup(("a",), 4), ModuleGroup(("b",), 8)], [Device("cpu", 5)]
        )
