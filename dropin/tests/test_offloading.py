"""Models that are offloaded while the CPU computes: what rests where, which files are written, and what a patch reaches."""

from __future__ import annotations

import json
import logging
import pickle
import re
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import accelerate.big_modeling
import accelerate.utils.modeling
from accelerate import (
    Accelerator,
    cpu_offload,
    disk_offload,
    dispatch_model,
    load_checkpoint_and_dispatch,
)
from accelerate.hooks import AlignDevicesHook, remove_hook_from_submodules
from accelerate.utils import (
    OffloadedWeightsLoader,
    align_module_device,
    find_executable_batch_size,
)
from accelerate.utils.operations import (
    ConvertOutputsToFp32,
    DistributedOperationException,
    gather,
)

MAP = {"first": "cpu", "norm": "disk", "last": "disk"}
X = torch.linspace(-1, 1, 6).view(2, 3)


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = (
            nn.Linear(3, 4),
            nn.BatchNorm1d(4),
            nn.Linear(4, 5),
        )

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(self.norm(self.first(x)))
        return result


def places(model: nn.Module) -> list[str]:
    return [parameter.device.type for parameter in model.parameters()]


@pytest.mark.parametrize("offloading", ["cpu", "disk", "map", "checkpoint"])
def test_offloaded_weights_rest_on_the_meta_device(
    offloading: str, tmp_path: Path
) -> None:
    model: Any = Small().eval()
    folder, file = tmp_path / "off", tmp_path / "weights.bin"
    expected, state = (
        model(X),
        {name: tensor.clone() for name, tensor in model.state_dict().items()},
    )
    torch.save(state, file)
    if offloading == "cpu":
        assert cpu_offload(model, torch.device("cpu")) is model
    elif offloading == "disk":
        assert disk_offload(model, folder, "cpu") is model
    elif offloading == "map":
        assert dispatch_model(model, MAP, offload_dir=folder) is model
    else:
        load_checkpoint_and_dispatch(model, file, MAP, offload_folder=folder)
    stays = 2 if offloading in ("map", "checkpoint") else 0
    for _ in range(2):
        assert places(model) == ["cpu"] * stays + ["meta"] * (6 - stays)
        assert type(model._hf_hook) is type(model.last._hf_hook) is AlignDevicesHook
        assert model(X).requires_grad
        assert torch.equal(model(X), expected)
    if offloading != "cpu":
        assert {*json.loads((folder / "index.json").read_text())} >= {
            "last.weight",
            "last.bias",
            "norm.weight",
        }
        assert torch.equal(
            OffloadedWeightsLoader(save_folder=folder)["last.weight"],
            state["last.weight"],
        )
    full_state: Any = Accelerator().get_state_dict(model)
    assert all(torch.equal(full_state[name], tensor) for name, tensor in state.items())
    remove_hook_from_submodules(model)
    assert places(model) == ["cpu"] * 6
    assert torch.equal(model(X), expected)
    assert "to" not in vars(model)


def test_a_folder_of_another_model_is_written_anew(tmp_path: Path) -> None:
    disk_offload(Small(), tmp_path, "cpu")
    model = Small().eval()
    expected = model(X)
    assert torch.equal(disk_offload(model, tmp_path, "cpu")(X), expected)
    assert torch.equal(cpu_offload(model, "cpu")(X), expected), (
        "a second offloading replaces the first"
    )


def test_a_dispatched_model_warns_and_refuses_to_move(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    dispatch_model(model := Small(), MAP, offload_dir=tmp_path)
    with (
        caplog.at_level(logging.WARNING),
        pytest.raises(RuntimeError, match=r"some modules offloaded to cpu or disk\.$"),
    ):
        model.to("cpu")
    assert (
        "You shouldn't move a model that is dispatched using accelerate hooks."
        in caplog.text
    )
    assert Accelerator(cpu=True).prepare(model) is model
    dispatched = dispatch_model(Small(), {"": "cpu"}, force_hooks=True)
    assert dispatched.to("cpu") is dispatched


def test_a_streamed_model_shows_the_hooks_of_its_map_and_saves_every_name(
    tmp_path: Path,
) -> None:
    """Streamed with the CPU as the device, as a map from a checkpoint's files lets it."""
    model: Any = Small().eval()
    expected = model(X)
    index = disk_index(model.state_dict(), tmp_path / "off")
    dispatch_model(
        model,
        MAP,
        offload_dir=tmp_path / "off",
        offload_index=index,
        offload_buffers=True,
    )
    shown = {
        name: (module._hf_hook.offload, module._hf_hook.offload_buffers)
        for name, module in model.named_modules()
    }
    assert shown == {
        "": (False, False),
        "first": (False, True),
        "norm": (True, True),
        "last": (True, True),
    }
    assert [model._hf_hook.execution_device, model.last._hf_hook.execution_device] == [
        "cpu",
        "cpu",
    ]
    assert torch.equal(model(X), expected)
    assert model(X).requires_grad
    for layer in (model.last, model.first):
        with align_module_device(layer):
            layer.weight.data.fill_(2.0)
        assert float(layer.weight.detach().mean()) == 2.0
    with pytest.raises(RuntimeError, match=r"some modules offloaded"):
        model.to("cpu")
    full_state = accelerate.utils.modeling.get_state_dict_offloaded_model(model)
    Accelerator().save_model(model, tmp_path / "saved")
    assert (
        {*load_file(tmp_path / "saved" / "model.safetensors")}
        == {*full_state}
        == {*model.state_dict()}
    )
    remove_hook_from_submodules(model)
    assert not torch.equal(model(X), expected)


def disk_index(state: dict[str, Tensor], folder: Path) -> dict[str, dict[str, str]]:
    folder.mkdir()
    save_file(state, folder / "all.safetensors")
    return {
        name: {
            "safetensors_file": str(folder / "all.safetensors"),
            "weight_name": name,
            "dtype": "float32",
        }
        for name in state
    }


def test_all_free_memory_is_offered() -> None:
    with patch(
        "hasten.extensions.bigmodel.device_map.free_host_bytes", return_value=1000
    ):
        assert accelerate.utils.modeling.get_max_memory() == {"cpu": 1000}


def test_a_name_patched_in_a_face_acts_behind_it(tmp_path: Path) -> None:
    original_function = accelerate.utils.modeling.get_max_memory
    with patch(
        "accelerate.utils.modeling.get_max_memory",
        return_value={"cpu": 1, "disk": 10**9},
    ) as limits_call:
        assert accelerate.utils.modeling.infer_auto_device_map(Small()) == {"": "disk"}
        assert limits_call.called
    assert accelerate.utils.modeling.get_max_memory is original_function
    assert set(accelerate.utils.modeling.infer_auto_device_map(Small()).values()) == {
        "cpu"
    }
    with (
        patch(
            "accelerate.big_modeling.infer_auto_device_map",
            side_effect=KeyError("asked"),
        ),
        pytest.raises(KeyError),
    ):
        load_checkpoint_and_dispatch(Small(), tmp_path, "sequential")


def test_weights_of_other_shapes_are_told_in_torchs_words(tmp_path: Path) -> None:
    torch.save({"weight": torch.ones(3, 3), "bias": torch.ones(3)}, tmp_path / "w.bin")
    with pytest.raises(
        RuntimeError, match=r"size mismatch for weight: .*\n.*size mismatch for bias"
    ):
        accelerate.utils.modeling.load_checkpoint_in_model(
            nn.Linear(2, 2), tmp_path / "w.bin"
        )
    with pytest.raises(ValueError, match="Trying to set a tensor of shape"):
        accelerate.utils.modeling.load_checkpoint_in_model(
            nn.Linear(2, 2), tmp_path / "w.bin", {"": "cpu"}
        )


@pytest.mark.usefixtures("fresh_states")  # an earlier state keeps its flag
def test_debug_mode_compares_the_shapes_of_processes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ACCELERATE_DEBUG_MODE", "1")
    expected_message = "Operation: `accelerate.utils.operations.gather`\nInput shapes:\n  - Process 0: [2, 3]\n  - Process 1: [1]"
    shapes = patch(
        "accelerate.utils.operations.gather_object", return_value=[[2, 3], [1]]
    )
    with (
        shapes,
        pytest.raises(DistributedOperationException, match=re.escape(expected_message)),
    ):
        gather(X)
    assert gather(X) is X


@pytest.mark.usefixtures("fresh_states")
def test_a_prepared_model_shows_the_forward_it_had() -> None:
    model = nn.Linear(2, 2)
    original_forward, accelerator = (
        model.forward,
        Accelerator(mixed_precision="bf16", cpu=True),
    )
    prepared: Any = accelerator.prepare(model)
    assert prepared._original_forward == original_forward
    plain = accelerator.unwrap_model(prepared, keep_fp32_wrapper=False)
    assert plain.forward == original_forward
    assert "_original_forward" not in vars(plain)
    with pytest.raises(pickle.PicklingError, match="unwrap the model"):
        pickle.dumps(ConvertOutputsToFp32(torch.relu))


def test_a_search_goes_on_from_the_size_that_fitted() -> None:
    tried: list[int] = []

    def attempt(batch_size: int) -> None:
        tried.append(batch_size)
        if batch_size > 13:
            raise RuntimeError("CUDA out of memory.")

    run = find_executable_batch_size(attempt, starting_batch_size=16)
    run()
    run()
    assert tried == [16, 14, 12, 12]
