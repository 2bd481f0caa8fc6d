"""One model or optimizer saved alone, and folders of torch.distributed.checkpoint, read without running code."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import nn

from accelerate._impl.checkpoints import object_files
from accelerate._impl.checkpoints.object_files import ObjectFiles
from hasten.checkpoint.format.torch_folder import whole_tensors
from hasten.checkpoint.inspect import merge
from hasten.comm.local import LocalComm
from hasten.errors import CheckpointError, IncompleteCheckpointError, UnsafeCheckpointError


def trained(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * (seed + 1))
    for _ in range(2):
        model(torch.randn(5, 3)).sum().backward()
        optimizer.step()
    return model, optimizer


def saved_dcp(folder: Path, state: dict[str, torch.Tensor]) -> None:
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        dcp.save(dict(state), storage_writer=dcp.FileSystemWriter(folder), no_dist=True)


@pytest.mark.parametrize("whole", [False, True])
def test_a_model_and_its_optimizer_come_back_bit_for_bit(tmp_path: Path, whole: bool) -> None:
    world = LocalComm()
    weights = ObjectFiles("model", tmp_path / "weights_0", tmp_path / "weights.bin")
    states = ObjectFiles("optimizer", tmp_path / "states_0", tmp_path / "states.bin")
    model, optimizer = trained(0)
    object_files.save_model(model, weights, world, whole)
    object_files.save_optimizer(optimizer, model, states, world, whole)
    assert weights.exists
    assert (weights.file.is_file(), weights.folder.is_dir()) == (whole, not whole)
    other, follower = trained(1)
    object_files.load_model(other, weights, world)
    object_files.load_optimizer(follower, other, states, world)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name])
    before, after = optimizer.state_dict(), follower.state_dict()
    assert before["param_groups"] == after["param_groups"]
    for index, state in before["state"].items():
        assert all(torch.equal(value, after["state"][index][key]) for key, value in state.items())


def test_some_tensors_can_be_saved_alone_and_must_be_all_there_is(tmp_path: Path) -> None:
    world, files = LocalComm(), ObjectFiles("model", tmp_path / "some", tmp_path / "some.bin")
    model, _ = trained(0)
    names = {"1.weight", "1.bias"}
    object_files.save_model(model, files, world, False, names)
    other, _ = trained(1)
    kept = other[0].weight.detach().clone()  # type: ignore[index]  # a Sequential
    object_files.load_model(other, files, world, names)
    assert torch.equal(other.get_parameter("1.weight"), model.get_parameter("1.weight"))
    assert torch.equal(other.get_parameter("0.weight"), kept)
    with pytest.raises(CheckpointError, match=r"lacks \['0.weight'\]"):
        object_files.load_model(other, files, world, {*names, "0.weight"})


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    files = ObjectFiles("model", tmp_path / "weights_0", tmp_path / "weights.bin")
    with pytest.raises(IncompleteCheckpointError, match=r"neither weights_0 nor weights.bin"):
        object_files.load_model(trained(0)[0], files, LocalComm())


@pytest.mark.parametrize("prefix", ["", "model."])
def test_folders_of_torch_are_loaded_and_merged(tmp_path: Path, prefix: str) -> None:
    model, _ = trained(0)
    saved_dcp(tmp_path / "torch", {f"{prefix}{name}": tensor for name, tensor in model.state_dict().items()})
    other, _ = trained(1)
    object_files.load_model(other, ObjectFiles("model", tmp_path / "torch", tmp_path / "none.bin"), LocalComm())
    merge(str(tmp_path / "torch"), tmp_path / "hub")
    merged = load_file(tmp_path / "hub" / "model.safetensors")
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name])
        assert torch.equal(tensor, merged[name])


def test_a_folder_of_torch_of_another_model_is_refused(tmp_path: Path) -> None:
    saved_dcp(tmp_path, {"0.weight": torch.zeros(4, 3), "more": torch.zeros(1)})
    with pytest.raises(CheckpointError, match=r"lacks \['0.bias', .*has \['more'\]"):
        object_files.load_model(trained(0)[0], ObjectFiles("model", tmp_path, tmp_path / "none.bin"), LocalComm())


def test_code_in_a_folder_of_torch_is_never_run(tmp_path: Path) -> None:
    class Hostile:
        def __reduce__(self) -> tuple[object, ...]:
            return (print, ("run",))

    (tmp_path / ".metadata").write_bytes(pickle.dumps(Hostile()))
    with pytest.raises(UnsafeCheckpointError, match=r"builtins\.print"):
        whole_tensors(tmp_path)
    (tmp_path / ".metadata").write_bytes(b"damaged")
    with pytest.raises(CheckpointError, match="damaged"):
        whole_tensors(tmp_path)
