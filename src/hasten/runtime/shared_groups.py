"""Process groups and meshes that live as long as the process group of the world, made once and shared by every Accelerator.

A group holds threads and sockets until the world's group is destroyed, so a script that makes many Accelerators, one for each trial
of a search, must not make new groups for each of them.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Hashable, Sequence
from datetime import timedelta
from functools import cache
from typing import Any, TypeVar

import torch.distributed as dist

from hasten.optional import need

T = TypeVar("T")


class _OfWorld:
    """What was made for one world group; another world group begins anew."""

    def __init__(self) -> None:
        self._world: weakref.ref[dist.ProcessGroup] | None = None
        self._made: dict[Hashable, Any] = {}  # Any: groups and meshes, each under a key of its kind

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        world = dist.group.WORLD
        assert world is not None, "groups are made in a process group"
        if self._world is None or self._world() is not world:
            self.forget()
            self._world = weakref.ref(world)
        if key not in self._made:
            self._made[key] = make()
        made: T = self._made[key]
        return made

    def forget(self) -> None:
        self._made.clear()
        self._world = None
        _forget_layouts()


def _forget_layouts() -> None:
    """Empty DTensor's caches: they know a mesh by its shape, so results in the next world would name groups of this one."""
    if "torch.distributed.tensor" in sys.modules:
        clear: Callable[[], None] = need("torch.distributed.tensor.debug")._clear_sharding_prop_cache
        clear()


@cache  # torch has one world for the whole process, and so must what is made in it be kept
def _registry() -> _OfWorld:
    return _OfWorld()


def once(key: Hashable, make: Callable[[], T]) -> T:
    """What `make` returned when it was first asked for by `key` in this world. Ranks: those that make it, in the same order."""
    return _registry().get(key, make)


def group_of(ranks: Sequence[int], timeout_s: float | None = None) -> dist.ProcessGroup:
    """The process group of these global ranks. Ranks: its members, in the same order."""

    def make() -> dist.ProcessGroup:
        limit = None if timeout_s is None else timedelta(seconds=timeout_s)
        group: dist.ProcessGroup = dist.new_group(list(ranks), timeout=limit, use_local_synchronization=True)
        return group

    return once(("group", tuple(ranks), timeout_s), make)


def forget() -> None:
    """Let go of every group and mesh, before the world's group is destroyed."""
    _registry().forget()
