"""Loading checkpoints of every layout into models on meta, with parts on the disk, converted, strictly, and safely."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hasten.checkpoint.export import save_model
from hasten.errors import (
    CheckpointError,
    ConfigError,
    PrepareError,
    UnsafeCheckpointError,
)
from hasten.extensions.bigmodel.dispatch import dispatch_model
from hasten.extensions.bigmodel.load import (
    load_checkpoint_and_dispatch,
    load_checkpoint_in_model,
)
from hasten.extensions.bigmodel.offload_files import (
    OffloadedWeightsLoader,
    offload_state_dict,
    offload_weight,
    read_offload_index,
)
from hasten.extensions.bigmodel.placed import end_dispatch, streamers_of
from hasten.modules.meta import init_empty_weights


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(4)
        )
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 20, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("table", torch.arange(8.0), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.table
        for layer in self.layers:
            x = layer(x)
        return torch.as_tensor(self.head(self.norm(x)))


IDS = torch.arange(6)


@pytest.fixture(autouse=True, scope="module")
def _warm() -> None:
    """Let torch's kernels open what they keep open for the life of the process."""
    with torch.no_grad():
        nn.Linear(16, 48)(torch.zeros(3, 4, 16))


def saved(folder: Path, **settings: Any) -> Net:
    torch.manual_seed(0)
    model = Net().eval()
    assert isinstance(model.norm.running_mean, Tensor)
    model.norm.running_mean.uniform_()
    save_model(model.state_dict(), folder, **settings)
    return model


def empty() -> Net:
    with init_empty_weights():
        return Net().eval()


LAYOUTS: list[dict[str, Any]] = [
    {},
    {"max_shard_size": 400},
    {"safe_serialization": False},
    {"safe_serialization": False, "max_shard_size": 400},
]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "device_map",
    [
        None,
        {"": "cpu"},
        {"": "disk"},
        {
            "embed": "cpu",
            "head": "cpu",
            "norm": "cpu",
            "table": "cpu",
            "layers": "disk",
        },
    ],
)
def test_every_layout_loads_to_every_place(
    layout: dict[str, Any], device_map: dict[str, str | int] | None, tmp_path: Path
) -> None:
    reference = saved(tmp_path / "model", **layout)
    model = empty()
    load_checkpoint_and_dispatch(
        model,
        tmp_path / "model",
        device_map,
        offload_folder=tmp_path / "off",
        strict=True,
    )
    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(model(IDS), reference(IDS))
    assert model.head.weight is model.embed.weight
    assert (device_map is not None and "disk" in device_map.values()) == bool(
        streamers_of(model)
    )
    if layout.get("safe_serialization", True):  # nothing is written twice
        assert not list((tmp_path / "off").glob("*.safetensors"))
    end_dispatch(model)


def test_an_index_file_and_a_single_file_are_checkpoints(tmp_path: Path) -> None:
    reference = saved(tmp_path, max_shard_size=400)
    model = empty()
    load_checkpoint_in_model(model, tmp_path / "model.safetensors.index.json")
    assert torch.equal(model(IDS), reference(IDS))
    saved(tmp_path / "one")
    model = empty()
    load_checkpoint_in_model(model, tmp_path / "one" / "model.safetensors")
    assert torch.equal(model(IDS), reference(IDS))


@pytest.mark.parametrize("device_map", [{"": "cpu"}, {"": "disk"}])
def test_weights_are_converted_on_the_way(
    device_map: dict[str, str | int], tmp_path: Path
) -> None:
    reference = saved(tmp_path / "model").to(torch.bfloat16)
    model = empty()
    load_checkpoint_and_dispatch(
        model,
        tmp_path / "model",
        device_map,
        dtype="bfloat16",
        offload_folder=tmp_path / "off",
    )
    assert model.layers[0][0].weight.dtype is torch.bfloat16  # type: ignore[index]
    model.table = model.table.to(torch.bfloat16)
    with torch.no_grad():
        assert torch.equal(model(IDS), reference(IDS))
    model = empty()
    load_checkpoint_in_model(
        model, tmp_path / "model", dtype=torch.float16, keep_in_fp32_modules=["norm"]
    )
    assert model.norm.weight.dtype is torch.float32
    assert model.norm.num_batches_tracked is not None
    assert model.norm.num_batches_tracked.dtype is torch.int64
    assert model.head.weight.dtype is torch.float16
    end_dispatch(model)


def test_a_model_on_a_device_is_filled_in_place(tmp_path: Path) -> None:
    reference = saved(tmp_path)
    model = Net().eval()
    parameter_ids = [id(parameter) for parameter in model.parameters()]
    load_checkpoint_in_model(model, tmp_path)
    assert [id(parameter) for parameter in model.parameters()] == parameter_ids
    assert torch.equal(model(IDS), reference(IDS))


def test_what_does_not_match_is_said_before_anything_changes(tmp_path: Path) -> None:
    saved(tmp_path)
    model = Net()
    model.extra = nn.Linear(2, 2)
    initial_state = {
        name: tensor.clone() for name, tensor in model.state_dict().items()
    }
    with pytest.raises(CheckpointError, match=r"lack extra\.weight, extra\.bias"):
        load_checkpoint_in_model(model, tmp_path, strict=True)
    model.layers[0] = nn.Sequential(nn.Linear(8, 9))
    with pytest.raises(
        CheckpointError, match=r"layers\.0\.0\.weight is \(8, 8\) in the files"
    ):
        load_checkpoint_in_model(model, tmp_path)
    assert all(
        torch.equal(initial_state[name], t)
        for name, t in model.state_dict().items()
        if not name.startswith("layers.0")
    )
    with pytest.raises(ConfigError, match="'balanced_low_0'"):
        load_checkpoint_and_dispatch(model, tmp_path, "everywhere")
    fresh = empty()
    fresh.extra = nn.Linear(2, 2, device="meta")
    with pytest.raises(PrepareError, match=r"extra\.weight and 1 more"):
        load_checkpoint_and_dispatch(
            fresh, tmp_path, {"": "disk"}, offload_folder=tmp_path / "off"
        )


def test_pickles_that_would_run_code_are_refused(tmp_path: Path) -> None:
    torch.save(
        {"embed.weight": torch.zeros(20, 8), "boom": os.system},
        tmp_path / "pytorch_model.bin",
    )
    with pytest.raises(UnsafeCheckpointError, match="allow_pickle"):
        load_checkpoint_in_model(empty(), tmp_path)


def test_auto_maps_fill_the_host_and_leave_the_rest_on_the_disk(tmp_path: Path) -> None:
    reference = saved(tmp_path / "model")
    model = empty()
    load_checkpoint_and_dispatch(
        model,
        tmp_path / "model",
        "auto",
        max_memory={"cpu": 1800},
        offload_folder=tmp_path / "off",
    )
    (streamer,) = streamers_of(model)
    assert 0 < streamer.host_bytes < sum(p.numel() * 4 for p in model.parameters())
    with torch.no_grad():
        assert torch.equal(model(IDS), reference(IDS))
    end_dispatch(model)


def test_folders_of_plain_files_are_read_and_written(tmp_path: Path) -> None:
    tensors = {
        "a.b": torch.arange(6.0).view(2, 3),
        "h": torch.ones(2, dtype=torch.bfloat16),
        "s": torch.tensor(3.0),
    }
    offload_state_dict(tmp_path, tensors)
    offload_weight(torch.ones(2), "alone", tmp_path)
    loader = OffloadedWeightsLoader({"z": torch.zeros(1)}, tmp_path)
    assert list(loader) == ["z", "a.b", "h", "s"]
    assert len(loader) == 4
    assert all(torch.equal(loader[name], value) for name, value in tensors.items())
    assert json.loads((tmp_path / "index.json").read_text())["h"] == {
        "dtype": "bfloat16",
        "shape": [2],
    }
    with pytest.raises(
        ValueError, match="Need either a `state_dict`, a `save_folder` or an `index`"
    ):
        OffloadedWeightsLoader()


def test_a_model_runs_from_plain_files(tmp_path: Path) -> None:
    torch.manual_seed(0)
    reference = Net().eval()
    offload_state_dict(
        tmp_path,
        {
            name: t
            for name, t in reference.state_dict().items()
            if name != "head.weight"
        },
    )
    model = empty()
    model.norm.load_state_dict(reference.norm.state_dict(), assign=True)
    device_map: dict[str, str | int | torch.device] = {"": "disk", "norm": "cpu"}
    dispatch_model(model, device_map, offload_dir=tmp_path)
    with torch.no_grad():
        assert torch.equal(model(IDS), reference(IDS))
    end_dispatch(model)


def test_a_kill_while_writing_leaves_nothing_half_written(tmp_path: Path) -> None:
    """Killed at some moment of offloading or loading to a folder: what has its final name is whole and loads."""
    pickled = tmp_path.with_name("pickled.bin")
    torch.save(
        nn.Sequential(*(nn.Linear(700, 700) for _ in range(16))).state_dict(), pickled
    )
    code = textwrap.dedent(
        f"""
        import torch
        from torch import nn
        from hasten.extensions.bigmodel.dispatch import disk_offload
        from hasten.extensions.bigmodel.load import load_checkpoint_and_dispatch
        model = nn.Sequential(*(nn.Linear(700, 700) for _ in range(16)))
        print("go", flush=True)
        for number in range(0, 200, 2):
            disk_offload(model, {str(tmp_path)!r} + f"/{{number}}", "cpu")
            again = nn.Sequential(*(nn.Linear(700, 700, device="meta") for _ in range(16)))
            folder = {str(tmp_path)!r} + f"/{{number + 1}}"
            load_checkpoint_and_dispatch(again, {str(pickled)!r}, {{"": "disk"}}, offload_folder=folder)
        """
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"go\n"
        while len(list(tmp_path.iterdir())) < 3:
            time.sleep(0.01)
            assert process.poll() is None, "it ended by itself"
        process.send_signal(signal.SIGKILL)
    files = tmp_path.rglob("*.safetensors")
    finished_files = [
        path for path in files if "/." not in str(path.relative_to(tmp_path.parent))
    ]
    assert finished_files
    for path in finished_files:
        model = nn.Sequential(*(nn.Linear(700, 700) for _ in range(16)))
        assert load_checkpoint_in_model(model, path, strict=True).num_bytes > 0
    assert all(read_offload_index(folder) == {} for folder in tmp_path.iterdir())
