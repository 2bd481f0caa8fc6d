"""Groups and meshes belong to one world: in the next one nothing of the last is used, by hasten or by torch's caches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from hasten.runtime.context import ProcessContext
from hasten.runtime.mesh import forget_groups, group_of, once_per_world
from hasten.testing.pool import ranks


@contextmanager
def world(file: Path) -> Iterator[None]:
    dist.init_process_group(
        "gloo", store=dist.FileStore(str(file), 1), rank=0, world_size=1
    )
    try:
        yield
    finally:
        forget_groups()
        dist.destroy_process_group()


def mesh() -> DeviceMesh:
    return once_per_world(
        "mesh", lambda: init_device_mesh("cpu", (1,), mesh_dim_names=("dp_shard",))
    )


@ranks(1)
def test_one_world_has_each_of_them_once(ctx: ProcessContext, tmp_path: Path) -> None:
    with world(tmp_path / "store"):
        assert mesh() is mesh()
        assert group_of([0]) is group_of([0])


@ranks(1)
def test_results_of_sharded_tensors_lie_on_the_mesh_of_their_own_world(
    ctx: ProcessContext, tmp_path: Path
) -> None:
    """Torch knows a mesh by its shape: it gave the result the layout of the same operation in the world before."""
    meshes = []
    for number in range(3):
        with world(tmp_path / str(number)):
            meshes.append(mesh())  # kept, as an old model keeps it
            assert len({id(known_mesh) for known_mesh in meshes}) == number + 1
            sharded = DTensor.from_local(
                torch.ones(4), mesh(), [Shard(0)], run_check=False
            )
            for result in (sharded * 2, sharded + sharded):
                assert isinstance(result, DTensor)
                assert result.device_mesh is mesh()
