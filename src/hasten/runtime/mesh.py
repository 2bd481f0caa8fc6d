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


class _WorldCache:
    """Cache of objects created for one world group; emptied when the world group changes."""

    def __init__(self) -> None:
        self._world: weakref.ref[dist.ProcessGroup] | None = None
        # Any: groups and meshes, each under a key of its kind
        self._made: dict[Hashable, Any] = {}

    def get(self, cache_key: Hashable, make: Callable[[], T]) -> T:
        world_group = dist.group.WORLD
        assert world_group is not None, "groups are made in a process group"
        if self._world is None or self._world() is not world_group:
            self.forget_all()
            self._world = weakref.ref(world_group)
        if cache_key not in self._made:
            self._made[cache_key] = make()
        cached_object: T = self._made[cache_key]
        return cached_object

    def forget_all(self) -> None:
        self._made.clear()
        self._world = None
        _clear_dtensor_caches()


def _clear_dtensor_caches() -> None:
    """Clear DTensor's caches, which identify a mesh by its shape: results in a new world would refer to old groups."""
    if "torch.distributed.tensor" in sys.modules:
        clear_cache: Callable[[], None] = need(
            "torch.distributed.tensor.debug"
        )._clear_sharding_prop_cache
        clear_cache()


@cache  # torch has one world per process, so the cache is per process too
def _world_cache() -> _WorldCache:
    return _WorldCache()


def once_per_world(cache_key: Hashable, make: Callable[[], T]) -> T:
    """Return the result of `make`, cached by `key` for this world. Ranks: those that create it, in the same order."""
    return _world_cache().get(cache_key, make)


def group_of(ranks: Sequence[int], timeout_s: float | None = None) -> dist.ProcessGroup:
    """Return the process group of these global ranks. Ranks: its members, in the same order."""

    def make_group() -> dist.ProcessGroup:
        if timeout_s is None:
            time_limit = None
        else:
            time_limit = timedelta(seconds=timeout_s)
        process_group: dist.ProcessGroup = dist.new_group(
            list(ranks), timeout=time_limit, use_local_synchronization=True
        )
        return process_group

    return once_per_world(("group", tuple(ranks), timeout_s), make_group)


def forget_groups() -> None:
    """Release every group and mesh, before the world's group is destroyed."""
    _world_cache().forget_all()


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
        self._collectives = collectives
        self._made: dict[tuple[int, ...], Comm] = {}

    def __call__(self, *axes: Axis) -> Comm:
        """Return the communicator over this rank's peers along `axes`."""
        peer_ranks = self._mesh.peers(self._rank, *axes)
        if len(peer_ranks) == self._mesh.world_size:
            return self._world
        if len(peer_ranks) == 1:
            return LocalComm(self._world.device, self._rank)
        if peer_ranks not in self._made:
            self._made[peer_ranks] = self._make(peer_ranks)
        return self._made[peer_ranks]

    def _make(self, peer_ranks: tuple[int, ...]) -> Comm:
        assert self._store is not None, (
            "a group of several ranks needs a process group and its store"
        )
        process_group = group_of(peer_ranks, self._timeout_s)
        return ProcessGroupComm(
            process_group,
            self._store,
            self._world.device,
            self._timeout_s,
            self._codec,
            self._collectives,
        )


def device_mesh(spec: MeshSpec, device: torch.device) -> DeviceMesh:
    """Return torch's DeviceMesh with every axis of `spec` by name, including axes of size one.

    Ranks of one sequence hold different shards of the parameters, so `dp_shard` is multiplied by the size of `cp`, and `cp` has size one.
    A single process without a process group gets a group of one. Ranks: every rank.
    """
    if not dist.is_initialized():
        local_store = dist.HashStore()
        backend = "gloo" if device.type == "cpu" else None
        dist.init_process_group(backend, store=local_store, rank=0, world_size=1)
        atexit.register(destroy_groups)
    spec = replace(spec, dp_shard=spec.size(*SHARD), cp=1)
    return _named_mesh(
        device,
        tuple(map(spec.size, AXES)),
        tuple(map(str, AXES)),
    )


def _named_mesh(
    device: torch.device, axis_sizes: tuple[int, ...], axis_names: tuple[str, ...]
) -> DeviceMesh:
    return once_per_world(
        ("mesh", device.type, axis_sizes, axis_names),
        lambda: dist.init_device_mesh(
            device.type, axis_sizes, mesh_dim_names=axis_names
        ),
    )


class WorldMesh:
    """Torch's mesh of the whole world, created on first use and shared by everything that distributes a model."""

    def __init__(self) -> None:
        self._world_mesh: DeviceMesh | None = None
        self._expert_mesh: DeviceMesh | None = None

    def mesh_along(self, ctx: ProcessContext, *axes: Axis) -> DeviceMesh:
        """Return this rank's submesh along `axes`. Ranks: every rank."""
        if self._world_mesh is None:
            self._world_mesh = device_mesh(ctx.mesh, ctx.device)
        axis_names = tuple(map(str, axes))
        world_mesh = self._world_mesh
        return once_per_world(
            ("part of", world_mesh.device_type, tuple(world_mesh.shape), axis_names),
            lambda: world_mesh[axis_names],
        )

    def expert_mesh(self, ctx: ProcessContext) -> DeviceMesh:
        """Return the mesh of data-parallel ranks for experts: replicas, shards, and `ep`. Ranks: every rank."""
        if self._expert_mesh is None:
            axis_names = (str(Axis.DP_REPLICATE), str(Axis.DP_SHARD), EXPERTS)
            self._expert_mesh = _named_mesh(
                ctx.device, ctx.mesh.expert_sizes, axis_names
            )
        return self._expert_mesh


def destroy_groups() -> None:
    """Destroy the process group if there is one. Ranks: each at its exit."""
    forget_groups()
    if dist.is_initialized():
        gc.collect()  # reducers and meshes hold references to the group
        dist.destroy_process_group()
