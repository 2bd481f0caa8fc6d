"""Finding, replacing and measuring parts of a model."""

from __future__ import annotations

import torch
from torch import nn

from hasten.modules import surgery
from hasten.modules import surgery as sizes


def model_with_shared_layer() -> nn.Sequential:
    shared = nn.Linear(4, 4)
    return nn.Sequential(shared, nn.Sequential(nn.Linear(4, 4), nn.ReLU()), shared)


def test_swaps_reach_every_name_of_a_module() -> None:
    net = model_with_shared_layer()
    swapped_names: list[str] = []

    def make(name: str, module: nn.Module) -> nn.Module:
        swapped_names.append(name)
        return nn.Identity()

    names = surgery.swap_where(net, lambda _, m: isinstance(m, nn.Linear), make)
    assert names == ["0", "1.0", "2"]
    assert swapped_names == ["0", "1.0"]
    assert net[0] is net[2]


def test_repeated_blocks_are_found() -> None:
    blocks = nn.ModuleList([nn.Sequential(nn.Linear(2, 2)) for _ in range(3)])
    assert surgery.repeated_blocks(nn.Sequential(nn.Embedding(3, 2), blocks)) == list(
        blocks
    )
    assert (
        surgery.repeated_blocks(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))) == []
    )


def test_sizes_count_shared_tensors_once_where_they_meet() -> None:
    net = model_with_shared_layer()
    layer_bytes = 20 * 4
    bytes_by_module = sizes.module_bytes(net)
    assert bytes_by_module[""] == 2 * layer_bytes
    assert (
        bytes_by_module["0"]
        == bytes_by_module["2"]
        == bytes_by_module["1"]
        == bytes_by_module["1.0"]
        == layer_bytes
    )
    assert bytes_by_module["1.0.weight"] == 64
    assert sizes.module_bytes(net, torch.float16)[""] == layer_bytes
    assert (
        sizes.module_bytes(net, special_dtypes={"1.0.weight": torch.float64})["1"]
        == 16 * 8 + 16
    )
    assert sizes.num_parameters(net) == 40
    net[0].requires_grad_(False)
    assert sizes.num_parameters(net, trainable_only=True) == 20
    counted = dict(sizes.named_tensors(nn.BatchNorm1d(2)))
    assert set(counted) == {
        "weight",
        "bias",
        "running_mean",
        "running_var",
        "num_batches_tracked",
    }
