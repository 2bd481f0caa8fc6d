"""Shards in host memory, of a mesh of another device: state stays beside its parameter, and no tensor is taken for another."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from hasten.checkpoint.export import save_object
from hasten.checkpoint.format.formats import find_tied_names
from hasten.errors import HastenError
from hasten.modules.names import local_tensor
from hasten.strategies.sharded_updates import update_own_shards


def on_the_host(tensor: Tensor) -> DTensor:
    """A shard in host memory, as CPU offload makes it; the mesh is one of meta devices, in place of an accelerator's."""
    mesh = DeviceMesh(
        "meta", [0], mesh_dim_names=("dp_shard",), _init_backend=False, _rank=0
    )
    spec = DTensorSpec(
        mesh,
        (Shard(0),),
        tensor_meta=TensorMeta(tensor.shape, tensor.stride(), tensor.dtype),
    )
    return DTensor(tensor, spec, requires_grad=False)  # type: ignore[no-untyped-call]  # torch leaves it untyped


def trained(parameter: nn.Parameter, gradients: list[Tensor]) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
    update_own_shards(optimizer)
    for gradient in gradients:
        parameter.grad = (
            on_the_host(gradient) if isinstance(parameter, DTensor) else gradient
        )
        optimizer.step()
    return optimizer


def test_momentum_stays_beside_its_parameter() -> None:
    start, gradients = torch.randn(4, 3), [torch.randn(4, 3) for _ in range(3)]
    sharded, plain = (
        nn.Parameter(on_the_host(start.clone())),
        nn.Parameter(start.clone()),
    )
    optimizer = trained(sharded, copy.deepcopy(gradients))
    trained(plain, gradients)
    momentum = optimizer.state[sharded]["momentum_buffer"]
    assert isinstance(momentum, DTensor)
    assert local_tensor(momentum).device.type == "cpu"
    torch.testing.assert_close(local_tensor(sharded), plain.detach())


def test_only_shards_that_share_memory_are_tied() -> None:
    weight, bias = on_the_host(torch.ones(4)), on_the_host(torch.zeros(4))
    assert find_tied_names({"weight": weight, "bias": bias}) == {}
    assert find_tied_names(
        {"weight": weight, "bias": bias, "other": weight.detach()}
    ) == {"other": "weight"}


def test_no_shard_is_lost_in_a_file(tmp_path: Path) -> None:
    shards = {"weight": on_the_host(torch.ones(4)), "bias": on_the_host(torch.zeros(4))}
    with pytest.raises(HastenError, match="weight is a part of a sharded tensor"):
        save_object(shards, tmp_path / "model.safetensors", safe_serialization=True)
    assert not list(tmp_path.iterdir())
