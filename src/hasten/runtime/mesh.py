"""The groups of a mesh: communicators along any set of axes, and torch's DeviceMesh for sharded parallelism."""

from __future__ import annotations

import atexit
import gc
import math
from dataclasses import replace

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from hasten.comm.base import Comm
from hasten.comm.collective_log import Trail
from hasten.comm.local import LocalComm
from hasten.comm.process_group import ProcessGroupComm
from hasten.comm.session import Credentials
from hasten.runtime.axes import AXES, EXPERTS, SHARD, Axis, MeshSpec
from hasten.runtime.context import ProcessContext
from hasten.runtime.shared_groups import forget, group_of, once


class Groups:
    """Communicators along mesh axes, made on first use. Ranks: every rank asks in the same order."""

    def __init__(
        self,
        mesh: MeshSpec,
        rank: int,
        world: Comm,
        store: dist.Store | None,
        timeout_s: float,
        credentials: Credentials | None = None,
        trail: Trail | None = None,
        checked: bool = False,
    ) -> None:
        self._mesh = mesh
        self._rank = rank
        self._world = world
        self._store = store
        self._timeout_s = timeout_s
        self._credentials = credentials
        self._trail = trail
        self._checked = checked
        self._made: dict[tuple[int, ...], Comm] = {}

    def __call__(self, *axes: Axis) -> Comm:
        """The communicator over this rank's peers along `axes`."""
        peers = self._mesh.peers(self._rank, *axes)
        if len(peers) == self._mesh.world_size:
            return self._world
        if len(peers) == 1:
            return LocalComm(self._world.device, self._rank)
        if peers not in self._made:
            self._made[peers] = self._make(peers)
        return self._made[peers]

    def _make(self, peers: tuple[int, ...]) -> Comm:
        assert self._store is not None, "a group of several ranks needs a process group and its store"
        group = group_of(peers, self._timeout_s)
        return ProcessGroupComm(
            group, self._store, self._world.device, self._timeout_s, self._credentials, self._trail, self._checked
        )


def device_mesh(spec: MeshSpec, device: torch.device) -> DeviceMesh:
    """Torch's DeviceMesh with every axis of `spec` by name, axes of size one included.

    Ranks of one sequence hold different shards of the parameters, so `dp_shard` takes the size of `cp` in, and `cp` has size one.
    A single process without a process group gets one of its own. Ranks: every rank.
    """
    if not dist.is_initialized():
        alone = dist.HashStore()
        backend = "gloo" if device.type == "cpu" else None
        dist.init_process_group(backend, store=alone, rank=0, world_size=1)
        atexit.register(stop)
    spec = replace(spec, dp_shard=spec.size(*SHARD), cp=1)
    return _mesh(device, tuple(spec.size(axis) for axis in AXES), tuple(str(axis) for axis in AXES))


def _mesh(device: torch.device, sizes: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    return once(
        ("mesh", device.type, sizes, names), lambda: dist.init_device_mesh(device.type, sizes, mesh_dim_names=names)
    )


class WorldMesh:
    """Torch's mesh of the whole world, made on first use and shared by everything that spreads a model over it."""

    def __init__(self) -> None:
        self._whole: DeviceMesh | None = None
        self._experts: DeviceMesh | None = None

    def along(self, ctx: ProcessContext, *axes: Axis) -> DeviceMesh:
        """This rank's part of the mesh along `axes`. Ranks: every rank."""
        if self._whole is None:
            self._whole = device_mesh(ctx.mesh, ctx.device)
        names, whole = tuple(str(axis) for axis in axes), self._whole
        return once(("part of", whole.device_type, tuple(whole.shape), names), lambda: whole[names])

    def experts(self, ctx: ProcessContext) -> DeviceMesh:
        """The data-parallel ranks as experts see them: copies, shards of the same, and `ep`. Ranks: every rank."""
        if self._experts is None:
            names = (str(Axis.DP_REPLICATE), str(Axis.DP_SHARD), EXPERTS)
            self._experts = _mesh(ctx.device, ctx.mesh.expert_sizes, names)
        return self._experts


def stop() -> None:
    """Destroy the process group if there still is one. Ranks: each at its own exit."""
    forget()
    if dist.is_initialized():
        gc.collect()  # reducers and meshes hold on to the group
        dist.destroy_process_group()


def readers_of(mesh: DeviceMesh) -> tuple[int, int]:
    """How many ranks of torch's mesh have samples of their own, and which this is: those of one model or sequence read the same."""
    names = mesh.mesh_dim_names or ("",) * mesh.ndim
    kept = [at for at, name in enumerate(names) if name not in (Axis.TP, Axis.CP)]
    sizes, places = [mesh.size(at) for at in kept], [mesh.get_local_rank(at) for at in kept]
    return math.prod(sizes), sum(place * math.prod(sizes[at + 1 :]) for at, place in enumerate(places))
