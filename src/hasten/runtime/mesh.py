"""Process groups of a mesh: communicators along any set of axes, and torch's DeviceMesh for sharded parallelism."""

from __future__ import annotations

import atexit
import gc
import sys
import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import cache
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from hasten.comm.base import Comm
from hasten.comm.collective_log import CollectiveRecord
from hasten.comm.encoding import PLAIN, Codec
from hasten.comm.local import LocalComm
from hasten.comm.process_group import ProcessGroupComm
from hasten.optional import need
from hasten.runtime.context import ProcessContext
from hasten.runtime.mesh_plan import AXES, EXPERTS, SHARD, Axis, MeshSpec

T = TypeVar("T")


class _OfWorld:
    """Cache of objects created for one world group; emptied when the world group changes."""

    def __init__(self) -> None:
        self._world: weakref.ref[dist.ProcessGroup] | None = None
        # Any: groups and meshes, each under a key of its kind
        self._made: dict[Hashable, Any] = {}

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
    """Clear DTensor's caches, which identify a mesh by its shape: results in a new world would refer to old groups."""
    if "torch.distributed.tensor" in sys.modules:
        clear: Callable[[], None] = need(
            "torch.distributed.tensor.debug"
        )._clear_sharding_prop_cache
        clear()


@cache  # torch has one world per process, so the cache is per process too
def _registry() -> _OfWorld:
    return _OfWorld()


def once(key: Hashable, make: Callable[[], T]) -> T:
    """Return the result of `make`, cached by `key` for this world. Ranks: those that create it, in the same order."""
    return _registry().get(key, make)


def group_of(ranks: Sequence[int], timeout_s: float | None = None) -> dist.ProcessGroup:
    """Return the process group of these global ranks. Ranks: its members, in the same order."""

    def make() -> dist.ProcessGroup:
        limit = None if timeout_s is None else timedelta(seconds=timeout_s)
        group: dist.ProcessGroup = dist.new_group(
            list(ranks), timeout=limit, use_local_synchronization=True
        )
        return group

    return once(("group", tuple(ranks), timeout_s), make)


def forget() -> None:
    """Release every group and mesh, before the world's group is destroyed."""
    _registry().forget()


class Groups:
    """Communicators along mesh axes, created on first use. Ranks: every rank, in the same order."""

    def __init__(
        self,
        mesh: MeshSpec,
        rank: int,
        world: Comm,
        store: dist.Store | None,
        timeout_s: float,
        codec: Codec = PLAIN,
        collectives: CollectiveRecord | None = None,
    ) -> None:
        self._mesh = mesh
        self._rank = rank
        self._world = world
        self._store = store
        self._timeout_s = timeout_s
        self._codec = codec
        self._trail = collectives
        self._made: dict[tuple[int, ...], Comm] = {}

    def __call__(self, *axes: Axis) -> Comm:
        """Return the communicator over this rank's peers along `axes`."""
        peers = self._mesh.peers(self._rank, *axes)
        if len(peers) == self._mesh.world_size:
            return self._world
        if len(peers) == 1:
            return LocalComm(self._world.device, self._rank)
        if peers not in self._made:
            self._made[peers] = self._make(peers)
        return self._made[peers]

    def _make(self, peers: tuple[int, ...]) -> Comm:
        assert self._store is not None, (
            "a group of several ranks needs a process group and its store"
        )
        group = group_of(peers, self._timeout_s)
        return ProcessGroupComm(
            group,
            self._store,
            self._world.device,
            self._timeout_s,
            self._codec,
            self._trail,
        )


def device_mesh(spec: MeshSpec, device: torch.device) -> DeviceMesh:
    """Return torch's DeviceMesh with every axis of `spec` by name, including axes of size one.

    Ranks of one sequence hold different shards of the parameters, so `dp_shard` is multiplied by the size of `cp`, and `cp` has size one.
    A single process without a process group gets a group of one. Ranks: every rank.
    """
    if not dist.is_initialized():
        alone = dist.HashStore()
        backend = "gloo" if device.type == "cpu" else None
        dist.init_process_group(backend, store=alone, rank=0, world_size=1)
        atexit.register(stop)
    spec = replace(spec, dp_shard=spec.size(*SHARD), cp=1)
    return _mesh(
        device,
        tuple(spec.size(axis) for axis in AXES),
        tuple(str(axis) for axis in AXES),
    )


def _mesh(
    device: torch.device, sizes: tuple[int, ...], names: tuple[str, ...]
) -> DeviceMesh:
    return once(
        ("mesh", device.type, sizes, names),
        lambda: dist.init_device_mesh(device.type, sizes, mesh_dim_names=names),
    )


class WorldMesh:
    """Torch's mesh of the whole world, created on first use and shared by everything that distributes a model."""

    def __init__(self) -> None:
        self._whole: DeviceMesh | None = None
        self._experts: DeviceMesh | None = None

    def along(self, ctx: ProcessContext, *axes: Axis) -> DeviceMesh:
        """Return this rank's submesh along `axes`. Ranks: every rank."""
        if self._whole is None:
            self._whole = device_mesh(ctx.mesh, ctx.device)
        names, whole = tuple(str(axis) for axis in axes), self._whole
        return once(
            ("part of", whole.device_type, tuple(whole.shape), names),
            lambda: whole[names],
        )

    def experts(self, ctx: ProcessContext) -> DeviceMesh:
        """Return the mesh of data-parallel ranks for experts: replicas, shards, and `ep`. Ranks: every rank."""
        if self._experts is None:
            names = (str(Axis.DP_REPLICATE), str(Axis.DP_SHARD), EXPERTS)
            self._experts = _mesh(ctx.device, ctx.mesh.expert_sizes, names)
        return self._experts


def stop() -> None:
    """Destroy the process group if there is one. Ranks: each at its exit."""
    forget()
    if dist.is_initialized():
        gc.collect()  # reducers and meshes hold references to the group
        dist.destroy_process_group()
