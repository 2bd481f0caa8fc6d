"""Building on meta, device maps, sizes and ties of real modules."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hasten.errors import ConfigError, PrepareError
from hasten.extensions.bigmodel.device_map import (
    check_device_map,
    clean_device_map,
    compute_module_sizes,
    devices_in_order,
    find_tied_parameters,
    get_balanced_memory,
    get_max_memory,
    infer_auto_device_map,
    module_nodes,
    retie_parameters,
)
from hasten.extensions.bigmodel.placement_plan import group_modules, place_modules
from hasten.modules.meta import init_empty_weights, init_on_device, meta_names


class Block(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return torch.as_tensor(x + self.down(torch.relu(self.up(x))))


class Tied(nn.Module):
    """An embedding whose weight is the head's too, blocks, and a buffer that no file holds."""

    def __init__(self, depth: int = 3, width: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, 16, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.full((1,), 2.0), persistent=False)

    def forward(self, x: Tensor) -> Any:
        x = self.embed(x) * self.scale
        for block in self.blocks:
            x = block(x)
        return torch.as_tensor(self.head(x))


def test_empty_weights_take_no_memory_and_keep_ties_and_buffers() -> None:
    with init_empty_weights():
        model = Tied()
    assert all(p.is_meta for p in model.parameters())
    assert model.head.weight is model.embed.weight
    assert isinstance(model.scale, Tensor)
    assert float(model.scale) == 2.0
    assert nn.Linear(2, 2).weight.device.type == "cpu"
    with init_empty_weights(include_buffers=True):
        assert meta_names(Tied())[-1] == "scale"


def test_a_forward_on_meta_weights_says_how_to_fill_them() -> None:
    with init_empty_weights():
        model = Tied()
    with pytest.raises(PrepareError, match="load_checkpoint_in_model"):
        model(torch.zeros(1, 2, dtype=torch.long))
    assert model.embed(torch.zeros(1, 2, dtype=torch.long, device="meta")).is_meta
    model.to_empty(device="cpu")
    copied = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    copied(torch.zeros(1, 2, dtype=torch.long))
    assert not any(module._forward_pre_hooks for module in copied.modules())


def test_a_constructor_that_raises_leaves_torch_as_it_was() -> None:
    register_parameter = nn.Module.register_parameter
    with pytest.raises(RuntimeError, match="stop"), init_on_device("meta"):
        raise RuntimeError("stop")
    assert nn.Module.register_parameter is register_parameter
    with init_on_device("cpu", include_buffers=True):
        assert meta_names(Tied()) == []


def test_a_map_covers_the_model_and_keeps_ties_together() -> None:
    # of which the host keeps one block, and room for two that stream through it
    model = Tied(depth=4)
    sizes = compute_module_sizes(model)
    device_map = infer_auto_device_map(
        model, {"cpu": sizes["embed"] + 3 * sizes["blocks.0"] + 8}, ["Block"]
    )
    check_device_map(model, device_map)
    assert device_map["embed"] == device_map["head"] == "cpu"
    assert device_map["blocks.0"] == "cpu"
    assert (
        device_map["blocks.1"]
        == device_map["blocks.2"]
        == device_map["blocks.3"]
        == "disk"
    )
    roomy_map = infer_auto_device_map(model, {"cpu": "1GB"})
    assert roomy_map == {"": "cpu"}


def test_an_accelerator_keeps_room_for_what_streams_through_it() -> None:
    model = Tied(depth=6)
    sizes = compute_module_sizes(model)
    block = sizes["blocks.0"]
    limit = sizes["embed"] + 4 + 4 * block
    result = place_modules(
        group_modules(module_nodes(model, ["Block"])),
        devices_in_order({0: limit, "cpu": 10 * block}),
    )
    assert result.reserved == 2 * block
    assert [result.places[f"blocks.{i}"] for i in range(6)] == [
        0,
        0,
        "cpu",
        "cpu",
        "cpu",
        "cpu",
    ]


def test_smaller_dtypes_fit_more() -> None:
    model = Tied()
    half = compute_module_sizes(model, torch.float16)
    assert half["blocks.1"] * 2 == compute_module_sizes(model)["blocks.1"]


def test_wrong_maps_are_refused() -> None:
    model = Tied()
    with pytest.raises(ConfigError, match=r"has no entry for blocks\.0"):
        check_device_map(model, {"embed": "cpu", "head": "cpu", "scale": "cpu"})
    with pytest.raises(ConfigError, match="names bocks"):
        check_device_map(model, {"": "cpu", "bocks": "cpu"})
    with pytest.raises(ConfigError, match="Raise a limit"):
        infer_auto_device_map(model, {"cpu": 100, "disk": 100})
    with pytest.raises(ConfigError, match="does not have"):
        get_max_memory({99: "1GB"})


def test_maps_are_written_short() -> None:
    long: dict[str, int | str] = {
        "a.x": 0,
        "a.y": 0,
        "b.x": 0,
        "b.y": "cpu",
        "c": "cpu",
    }
    assert clean_device_map(dict(long)) == {"a": 0, "b.x": 0, "b.y": "cpu", "c": "cpu"}
    assert clean_device_map({"a.x": 0, "b": 0}) == {"": 0}


def test_free_memory_is_found() -> None:
    limits = get_max_memory()
    assert limits["cpu"] > 10**8
    assert list(get_max_memory({"disk": "1MB", "cpu": "2MiB"}).items()) == [
        ("cpu", 2 * 1024**2),
        ("disk", 10**6),
    ]
    assert get_balanced_memory(Tied(), {"cpu": 100}) == {"cpu": 100}


def test_ties_are_found_and_made_again() -> None:
    model = Tied()
    groups = find_tied_parameters(model)
    assert groups == [["embed.weight", "head.weight"]]
    model.head.weight = nn.Parameter(torch.empty(16, 8, device="meta"))
    retie_parameters(model, groups)
    assert model.head.weight is model.embed.weight
    assert not model.head.weight.is_meta
