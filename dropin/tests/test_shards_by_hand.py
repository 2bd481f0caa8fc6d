"""One model or optimizer saved alone, and folders of torch.distributed.checkpoint, read without running code."""

from __future__ import annotations

import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import nn

from accelerate import FullyShardedDataParallelPlugin
from accelerate.utils import (
    fsdp_utils,
    load_fsdp_model,
    load_fsdp_optimizer,
    save_fsdp_model,
    save_fsdp_optimizer,
)
from hasten.comm.local import LocalComm
from hasten.errors import (
    CheckpointError,
    IncompleteCheckpointError,
    UnsafeCheckpointError,
)
from hasten.extensions.checkpoint_tools.inspect import merge_shards
from hasten.extensions.checkpoint_tools.torch_folder import whole_tensors

# Any in this file: a stand-in of an Accelerator, and peft's models.


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


@pytest.fixture
def accelerator() -> Any:
    """What saving and loading by hand ask of an Accelerator of one process."""
    world = LocalComm()
    return SimpleNamespace(
        ctx=SimpleNamespace(world=world, rank=world.rank),
        unwrap_model=lambda model: model,
    )


WAYS = [
    ("SHARDED_STATE_DICT", True),
    ("SHARDED_STATE_DICT", False),
    ("FULL_STATE_DICT", True),
]


@pytest.mark.parametrize(("kind", "use_dcp"), WAYS)
def test_a_model_and_its_optimizer_come_back_bit_for_bit(
    tmp_path: Path, accelerator: Any, kind: str, use_dcp: bool
) -> None:
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type=kind)
    model, optimizer = trained(0)
    save_fsdp_model(plugin, accelerator, model, tmp_path, use_dcp=use_dcp)
    save_fsdp_optimizer(
        plugin, accelerator, optimizer, model, tmp_path, use_dcp=use_dcp
    )
    names = {"SHARDED_STATE_DICT": {"pytorch_model_fsdp_0", "optimizer_0"}}
    rank_files = {"pytorch_model_fsdp_0_rank0.bin", "optimizer_0_rank0.bin"}
    expected = (
        names.get(kind, {"pytorch_model_fsdp.bin", "optimizer.bin"})
        if use_dcp
        else rank_files
    )
    assert {path.name for path in tmp_path.iterdir()} == expected
    loaded_model, follower = trained(1)
    load_fsdp_model(plugin, accelerator, loaded_model, tmp_path, use_dcp=use_dcp)
    load_fsdp_optimizer(
        plugin, accelerator, follower, loaded_model, tmp_path, use_dcp=use_dcp
    )
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, loaded_model.state_dict()[name])
    saved_state, loaded_state = optimizer.state_dict(), follower.state_dict()
    assert saved_state["param_groups"] == loaded_state["param_groups"]
    for index, state in saved_state["state"].items():
        assert all(
            torch.equal(value, loaded_state["state"][index][key])
            for key, value in state.items()
        )


@pytest.mark.parametrize("kind", ["SHARDED_STATE_DICT", "FULL_STATE_DICT"])
def test_an_adapter_is_saved_alone_and_must_be_all_there_is(
    tmp_path: Path, accelerator: Any, kind: str
) -> None:
    peft = pytest.importorskip("peft")

    def adapted(seed: int, targets: list[str]) -> Any:
        torch.manual_seed(seed)
        model = peft.get_peft_model(
            trained(seed)[0], peft.LoraConfig(target_modules=targets, r=2)
        )
        for parameter in model.parameters():
            parameter.data.normal_()
        return model

    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type=kind)
    model, loaded_model, larger = (
        adapted(0, ["1"]),
        adapted(1, ["1"]),
        adapted(2, ["0", "1"]),
    )
    base = loaded_model.base_model.model[0].weight.detach().clone()
    save_fsdp_model(plugin, accelerator, model, tmp_path, adapter_only=True)
    load_fsdp_model(plugin, accelerator, loaded_model, tmp_path, adapter_only=True)
    weights, loaded = model.state_dict(), loaded_model.state_dict()
    assert all(
        torch.equal(weights[name], loaded[name]) for name in weights if "lora" in name
    )
    assert torch.equal(loaded_model.base_model.model[0].weight, base)
    with pytest.raises(CheckpointError, match=r"lacks \['base_model.model.0.lora_A"):
        load_fsdp_model(plugin, accelerator, larger, tmp_path, adapter_only=True)


def test_what_is_not_there_is_named(tmp_path: Path, accelerator: Any) -> None:
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
    with pytest.raises(
        IncompleteCheckpointError,
        match=r"neither pytorch_model_fsdp_0 nor pytorch_model_fsdp.bin",
    ):
        load_fsdp_model(plugin, accelerator, trained(0)[0], tmp_path)


@pytest.mark.parametrize("prefix", ["", "model."])
def test_folders_of_torch_are_loaded_and_merged(
    tmp_path: Path, accelerator: Any, prefix: str
) -> None:
    model, _ = trained(0)
    folder = tmp_path / "pytorch_model_fsdp_0"
    saved_dcp(
        folder,
        {f"{prefix}{name}": tensor for name, tensor in model.state_dict().items()},
    )
    loaded_model, _ = trained(1)
    load_fsdp_model(
        FullyShardedDataParallelPlugin(fsdp_version=2),
        accelerator,
        loaded_model,
        folder,
    )
    merge_shards(str(folder), tmp_path / "hub")
    merged = load_file(tmp_path / "hub" / "model.safetensors")
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, loaded_model.state_dict()[name])
        assert torch.equal(tensor, merged[name])


def test_a_folder_of_torch_of_another_model_is_refused(
    tmp_path: Path, accelerator: Any
) -> None:
    folder = tmp_path / "pytorch_model_fsdp_0"
    saved_dcp(folder, {"0.weight": torch.zeros(4, 3), "more": torch.zeros(1)})
    with pytest.raises(CheckpointError, match=r"lacks \['0.bias', .*has \['more'\]"):
        load_fsdp_model(
            FullyShardedDataParallelPlugin(fsdp_version=2),
            accelerator,
            trained(0)[0],
            folder,
        )


def test_replaced_functions_of_state_dictionaries_act(
    tmp_path: Path, accelerator: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[str] = []
    for name in ("_get_model_state_dict", "_set_model_state_dict"):
        shipped = getattr(fsdp_utils, name)

        def replaced(
            *args: Any, name: str = name, shipped: Any = shipped, **kwargs: Any
        ) -> Any:
            called.append(name)
            return shipped(*args, **kwargs)

        monkeypatch.setattr(fsdp_utils, name, replaced)
    plugin, (model, _) = FullyShardedDataParallelPlugin(fsdp_version=2), trained(0)
    save_fsdp_model(plugin, accelerator, model, tmp_path)
    load_fsdp_model(plugin, accelerator, model, tmp_path)
    assert called == [
        "_get_model_state_dict",
        "_get_model_state_dict",
        "_set_model_state_dict",
    ]


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
