"""Exported models in the Hub layout, and the commands that look at, merge and convert checkpoints."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

from hasten import Accelerator
from hasten.checkpoint.export import parse_size, read_model, save_model, save_object
from hasten.cli.main import main
from hasten.errors import (
    CheckpointError,
    ConfigError,
    CorruptCheckpointError,
    MissingPackageError,
    UnsafeCheckpointError,
)
from hasten.extensions.hub.client import HubRepository, upload_folder
from hasten.optional import available


def model() -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(6)))
    last: Any = net[5]
    last.weight = net[0].weight  # tied, like an output layer to its embedding
    return net


@pytest.mark.parametrize("safe", [True, False])
@pytest.mark.parametrize("limit", ["10GB", "2500B"])
def test_hub_layout_comes_back_with_ties(
    tmp_path: Path, safe: bool, limit: str
) -> None:
    state = model().state_dict()
    files = save_model(state, tmp_path, limit, safe)
    end, stem = ("safetensors", "model") if safe else ("bin", "pytorch_model")
    if limit == "10GB":
        assert files == [f"{stem}.{end}"]
    else:
        index = json.loads((tmp_path / f"{stem}.{end}.index.json").read_text())
        assert set(index["weight_map"]) == set(state)
        assert {path.name for path in tmp_path.iterdir()} == {
            *index["weight_map"].values(),
            f"{stem}.{end}.index.json",
        }
    read_state = read_model(tmp_path)
    assert read_state.keys() == state.keys()
    assert all(torch.equal(read_state[key], state[key]) for key in state)
    assert read_state["0.weight"].data_ptr() == read_state["5.weight"].data_ptr(), (
        "one memory, two names"
    )
    size = sum(path.stat().st_size for path in tmp_path.glob(f"*.{end}"))
    assert size < 5 * 16 * 16 * 4 + 12_000, "the tied weight is stored once"


def test_other_tools_read_it_and_an_export_replaces_an_export(tmp_path: Path) -> None:
    state = model().state_dict()
    save_model(state, tmp_path, "2500B")
    save_model(state, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"], (
        "the shards of the first are gone"
    )
    read = safetensors.torch.load_file(tmp_path / "model.safetensors")
    assert torch.equal(read["3.weight"], state["3.weight"])
    with safetensors.safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert file.metadata()["format"] == "pt"


def test_sizes() -> None:
    assert [parse_size(s) for s in ("10GB", "2GiB", "1.5MB", "100B", 7)] == [
        10**10,
        2**31,
        1_500_000,
        100,
        7,
    ]
    for wrong in ("10", "GB", "ten GB", "-"):
        with pytest.raises(ConfigError, match="write it as 10GB"):
            parse_size(wrong)


def test_extra_state_is_never_lost_silently(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot hold, and it would be lost"):
        save_model({"w": torch.ones(1), "_extra_state": {"a": 1}}, tmp_path)


def test_bad_exports_are_typed_errors(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(
        '{"weight_map": {"a": "../../etc/passwd"}}'
    )
    with pytest.raises(UnsafeCheckpointError, match="outside the checkpoint"):
        read_model(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(CorruptCheckpointError, match="not an index"):
        read_model(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(print))
    (tmp_path / "model.safetensors.index.json").unlink()
    with pytest.raises(UnsafeCheckpointError, match="allow_pickle=True"):
        read_model(tmp_path)


def test_save_object_replaces_the_file_at_once(tmp_path: Path) -> None:
    for value in ({"a": 1}, {"a": torch.ones(2)}):
        save_object(value, tmp_path / "deep" / "x.pt")
    assert torch.equal(torch.load(tmp_path / "deep" / "x.pt")["a"], torch.ones(2))
    save_object(
        {"a": torch.ones(2)}, tmp_path / "y.safetensors", safe_serialization=True
    )
    assert torch.equal(
        safetensors.torch.load_file(tmp_path / "y.safetensors")["a"], torch.ones(2)
    )
    with pytest.raises(ConfigError, match="flat dict of tensors"):
        save_object({"a": 1}, tmp_path / "z.safetensors", safe_serialization=True)
    assert sorted(path.name for path in tmp_path.rglob("*")) == [
        "deep",
        "x.pt",
        "y.safetensors",
    ]


def test_pushing_needs_the_package_and_a_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not a folder"):
        upload_folder(tmp_path / "absent", HubRepository("me/model"), "first")
    if not available("huggingface_hub"):
        with pytest.raises(MissingPackageError, match=r"hasten\[hub\]"):
            upload_folder(tmp_path, HubRepository("me/model"), "first")


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    accelerator = Accelerator(cpu=True, project_dir=str(tmp_path / "run"))
    net = model()
    net, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters()))
    accelerator.save_state(metrics={"loss": 0.5})
    accelerator.backward(net(torch.ones(1, 16)).sum())
    optimizer.step()
    accelerator.save_state()
    return tmp_path / "run" / "checkpoints"


def ckpt(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str]:
    code = main(["ckpt", *map(str, words)])
    captured = capsys.readouterr()
    return code, captured.out + captured.err


def test_list_show_and_verify(
    run_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, text = ckpt(capsys, "list", run_folder)
    assert code == 0
    assert "checkpoint_0" in text
    assert "loss=0.5" in text
    rows = json.loads(ckpt(capsys, "list", run_folder.parent, "--json")[1])
    assert [(row["name"], row["step"], row["complete"]) for row in rows] == [
        ("checkpoint_0", 0, True),
        ("checkpoint_1", 1, True),
    ]
    description = json.loads(ckpt(capsys, "show", run_folder, "--json", "--tensors")[1])
    assert description["name"] == "checkpoint_1"
    assert (
        description["components"]["model"]["tensors"]["0.weight"] == "float32[16, 16]"
    )
    assert description["components"]["model"]["aliases"] == {"5.weight": "0.weight"}
    assert ckpt(capsys, "show", run_folder)[0] == 0
    assert ckpt(capsys, "verify", run_folder, "--all") == (
        0,
        "checkpoint_0: sound\ncheckpoint_1: sound\n",
    )
    file = run_folder / "checkpoint_1" / "optimizer.bin"
    file.write_bytes(file.read_bytes()[:-1] + b"\x01")
    code, text = ckpt(capsys, "verify", run_folder)
    assert code == 1
    assert "optimizer.bin has a wrong checksum" in text
    file.unlink()
    assert "INCOMPLETE" in ckpt(capsys, "list", run_folder)[1]


def test_the_folder_of_a_run_shows_numbered_and_named_checkpoints(
    run_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_folder.parent
    assert ckpt(capsys, "verify", run, "--all") == (
        0,
        "checkpoint_0: sound\ncheckpoint_1: sound\n",
    )
    assert ckpt(capsys, "verify", run_folder / "absent", "--all")[0] == 1, (
        "nothing there is not sound"
    )
    shutil.copytree(run_folder / "checkpoint_0", run / "best")
    names = [row["name"] for row in json.loads(ckpt(capsys, "list", run, "--json")[1])]
    assert names == ["best", "checkpoint_0", "checkpoint_1"]
    (run_folder / "checkpoint_0" / "manifest.json").write_text("{")
    code, text = ckpt(capsys, "verify", run, "--all")
    assert code == 1
    assert "checkpoint_0: DAMAGED" in text
    assert "checkpoint_1: sound" in text, (
        "one damaged checkpoint does not hide the others"
    )


def test_diff_and_merge(
    run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = run_folder / "checkpoint_0", run_folder / "checkpoint_1"
    assert ckpt(capsys, "diff", first, first) == (0, "equal\n")
    code, text = ckpt(capsys, "diff", first, second)
    assert code == 1
    assert "0.weight: values differ, by 0.00" in text
    code, text = ckpt(capsys, "diff", first, second, "--component", "optimizer")
    assert "only in the second" in text
    assert ckpt(capsys, "merge", second, tmp_path / "out")[0] == 0
    assert ckpt(capsys, "diff", second, tmp_path / "out") == (0, "equal\n")
    code, text = ckpt(
        capsys, "merge", second, tmp_path / "out", "--component", "optimizer"
    )
    assert code == 1
    assert "it has ['model']" in text
    code, text = ckpt(capsys, "show", tmp_path)
    assert code == 1
    assert "not a complete hasten checkpoint" in text


def test_convert_a_folder_of_torch_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The layout that Hugging Face Accelerate writes: weights, optimizer by position, scheduler, pickled random state."""
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    net(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    scheduler.step()
    old = tmp_path / "old"
    old.mkdir()
    safetensors.torch.save_file(net.state_dict(), old / "model.safetensors")
    torch.save(optimizer.state_dict(), old / "optimizer.bin")
    torch.save(scheduler.state_dict(), old / "scheduler.bin")
    (old / "random_states_0.pkl").write_bytes(pickle.dumps({"step": 3}))
    code, text = ckpt(capsys, "convert", old, tmp_path / "new")
    assert code == 0
    assert "random states" in text

    accelerator = Accelerator(cpu=True)
    fresh = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    loaded_optimizer = torch.optim.AdamW(fresh.parameters(), lr=1.0)
    fresh, loaded_optimizer, later = accelerator.prepare(
        fresh, loaded_optimizer, torch.optim.lr_scheduler.StepLR(loaded_optimizer, 1)
    )
    accelerator.load_state(tmp_path / "new")
    assert all(
        torch.equal(a, b)
        for a, b in zip(net.parameters(), fresh.parameters(), strict=True)
    )
    for a, b in zip(net.parameters(), fresh.parameters(), strict=True):
        assert torch.equal(
            optimizer.state[a]["exp_avg"], loaded_optimizer.state[b]["exp_avg"]
        )
    assert loaded_optimizer.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
    assert later.last_epoch == 1
    (old / "custom_checkpoint_0.pkl").write_bytes(pickle.dumps({"x": print}))
    code, text = ckpt(capsys, "convert", old, tmp_path / "newer")
    assert code == 1
    assert "allow_pickle=True" in text
