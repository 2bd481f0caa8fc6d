"""Nothing that writes into a folder destroys another complete thing that lies there."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.utils.data import DataLoader

from hasten import Accelerator, ProjectConfiguration
from hasten.checkpoint.export import read_model, save_model
from hasten.cli.main import main
from hasten.errors import ArgumentError, CheckpointError
from hasten.extensions.checkpoint_tools.inspect import (
    find_checkpoint,
    verify_checkpoint,
)
from hasten.extensions.remote.remote_store import RemoteStore
from hasten.extensions.trainer.arguments import TrainingArguments
from hasten.extensions.trainer.trainer import Trainer


class Counter:
    """An object that is registered for checkpointing."""

    def __init__(self) -> None:
        self.count = 7

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


class Run:
    """A small training run with everything a checkpoint can hold."""

    def __init__(self, folder: Path, total_limit: int | None = None) -> None:
        torch.manual_seed(0)
        project = ProjectConfiguration(project_dir=str(folder), total_limit=total_limit)
        self.accelerator = Accelerator(cpu=True, project_config=project)
        net, data = nn.Linear(4, 2), cast(Any, torch.randn(8, 4))
        self.model, self.optimizer, self.loader = self.accelerator.prepare(
            net, torch.optim.AdamW(net.parameters()), DataLoader(data, batch_size=2)
        )
        self.counter = Counter()
        self.accelerator.register_for_checkpointing(self.counter)

    def step(self) -> None:
        self.accelerator.backward(self.model(torch.ones(1, 4)).sum())
        self.optimizer.step()
        self.optimizer.zero_grad()


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path / "run")


def content(folder: Path) -> dict[str, bytes]:
    return {
        str(p.relative_to(folder)): p.read_bytes()
        for p in sorted(folder.rglob("*"))
        if p.is_file()
    }


def ckpt(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str]:
    code = main(["ckpt", *map(str, words)])
    captured = capsys.readouterr()
    return code, captured.out + captured.err


def test_a_checkpoint_is_not_converted_into_less(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "A"
    run.accelerator.save_state(folder)
    initial_content = content(folder)
    (tmp_path / "link").symlink_to(folder)
    for target in (folder, tmp_path / "link", tmp_path / "B", folder / "sub"):
        code, text = ckpt(capsys, "convert", folder, target)
        assert code == 1
        assert "is a checkpoint of hasten already" in text
    assert content(folder) == initial_content
    assert not (tmp_path / "B").exists()


def _fill(kind: str, folder: Path, run: Run) -> None:
    if kind == "checkpoint":
        run.accelerator.save_state(folder)
    elif kind == "model":
        run.accelerator.save_model(run.model, folder, max_shard_size="20B")
    elif kind == "torch":
        dcp.save({"model": {"w": torch.ones(3)}}, checkpoint_id=folder, no_dist=True)
    else:
        folder.mkdir()
        torch.save(
            torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1).state_dict(),
            folder / "optimizer.bin",
        )


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(
    "kind", ["checkpoint", "model", "torch", "optimizer of another tool"]
)
@pytest.mark.parametrize("command", ["merge", "convert"])
def test_commands_replace_no_checkpoint_and_no_model(
    command: str,
    kind: str,
    run: Run,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    _fill("checkpoint" if command == "merge" else "model", source, run)
    _fill(kind, target, run)
    (target / "notes.txt").write_text("mine")
    run.step()
    initial_content = content(target)
    code, text = ckpt(capsys, command, source, target)
    assert code == 1
    assert "already holds" in text
    assert content(target) == initial_content
    for name in initial_content.keys() - {"notes.txt"}:
        (target / name).unlink()
    assert ckpt(capsys, command, source, target)[0] == 0
    assert ckpt(capsys, "diff", source, target) == (0, "equal\n")
    final_content = content(target)
    assert final_content["notes.txt"] == b"mine"
    if command == "merge":
        assert set(final_content) == {"model.safetensors", "notes.txt"}
    else:
        assert set(final_content) == {"model.safetensors", "manifest.json", "notes.txt"}
        assert verify_checkpoint(*find_checkpoint(str(target))) == []


def test_source_and_target_are_never_one_folder(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run.accelerator.save_state(tmp_path / "A")
    run.accelerator.save_model(run.model, tmp_path / "M")
    for command, folder in (("merge", tmp_path / "A"), ("convert", tmp_path / "M")):
        initial_content = content(folder)
        code, text = ckpt(capsys, command, folder, folder / ".." / folder.name)
        assert code == 1
        assert "already holds" in text
        assert content(folder) == initial_content


@pytest.mark.parametrize("safe", [True, False])
@pytest.mark.parametrize("size", ["10GB", "20B"])
def test_a_model_is_not_saved_into_a_checkpoint(
    safe: bool, size: str, run: Run, tmp_path: Path
) -> None:
    folder = tmp_path / "F"
    run.accelerator.save_state(folder, safe_serialization=safe)
    saved = {key: value.clone() for key, value in run.model.state_dict().items()}
    run.step()
    initial_content = content(folder)
    for safe_export in (safe, not safe):
        with pytest.raises(
            CheckpointError, match=r"holds a checkpoint, and .*Write to another folder"
        ):
            run.accelerator.save_model(run.model, folder, size, safe_export)
    assert content(folder) == initial_content
    run.accelerator.load_state(folder)
    assert all(
        torch.equal(value, saved[key]) for key, value in run.model.state_dict().items()
    )
    assert read_model(folder).keys() == saved.keys()
    run.accelerator.save_model(run.model, folder / "export", size, safe)
    run.accelerator.load_state(folder)


@pytest.mark.parametrize("size", ["10GB", "20B"])
def test_a_checkpoint_does_not_replace_or_hide_an_exported_model(
    size: str, run: Run, tmp_path: Path
) -> None:
    folder = tmp_path / "pretrained"
    run.accelerator.save_model(run.model, folder, size)
    initial_content = content(folder)
    with pytest.raises(
        CheckpointError,
        match=r"holds an exported model .*Save the checkpoint into another folder",
    ):
        run.accelerator.save_state(folder)
    assert content(folder) == initial_content


def test_a_single_object_does_not_replace_a_file_of_a_checkpoint(
    run: Run, tmp_path: Path
) -> None:
    run.accelerator.save_state(tmp_path / "F")
    for name, safe in (("optimizer.bin", False), ("model.safetensors", True)):
        with pytest.raises(CheckpointError, match="holds a checkpoint, and"):
            run.accelerator.save(
                {"x": torch.ones(1)}, tmp_path / "F" / name, safe_serialization=safe
            )
    run.accelerator.save({"x": 1}, tmp_path / "F" / "extra.pt")
    run.accelerator.load_state(tmp_path / "F")


def test_a_trainer_does_not_save_over_a_checkpoint(tmp_path: Path) -> None:
    class Pretrained(nn.Module):
        """As transformers' models: writes its files itself."""

        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(4, 1)

        def forward(
            self, x: torch.Tensor, labels: torch.Tensor
        ) -> dict[str, torch.Tensor]:
            return {"loss": (self.body(x) - labels).pow(2).mean()}

        def save_pretrained(
            self, folder: str, state_dict: dict[str, torch.Tensor]
        ) -> None:
            save_model(state_dict, folder)
            (Path(folder) / "model.safetensors").write_bytes(b"other weights")

    rows = [{"x": torch.ones(4), "labels": torch.zeros(1)} for _ in range(4)]
    args = TrainingArguments(
        str(tmp_path / "out"), max_steps=1, use_cpu=True, save_steps=1
    )
    trainer = Trainer(model=Pretrained(), args=args, train_dataset=rows)
    trainer.train()
    checkpoint = next((tmp_path / "out" / "checkpoints").glob("checkpoint_*"))
    initial_content = content(checkpoint)
    with pytest.raises(CheckpointError, match="holds a checkpoint"):
        trainer.save_model(str(checkpoint))
    assert content(checkpoint) == initial_content
    trainer.save_model(str(tmp_path / "out"))
    trainer.accelerator.load_state(str(checkpoint))


def test_a_linked_checkpoint_is_unlinked_by_retention_and_its_target_stays(
    tmp_path: Path,
) -> None:
    run = Run(tmp_path / "run")
    run.accelerator.save_state(tmp_path / "elsewhere")
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "run" / "checkpoints" / "checkpoint_0").symlink_to(
        tmp_path / "elsewhere"
    )
    accelerator = Run(tmp_path / "run", total_limit=1).accelerator
    accelerator.load_state()  # retention leaves what a run neither wrote nor loaded
    accelerator.save_state()
    assert [p.name for p in (tmp_path / "run" / "checkpoints").iterdir()] == [
        "checkpoint_1"
    ]
    assert verify_checkpoint(*find_checkpoint(str(tmp_path / "elsewhere"))) == []


def test_a_save_to_a_url_leaves_the_users_files_alone(run: Run) -> None:
    url = f"memory://bucket-{uuid.uuid4().hex[:8]}/run"
    store = RemoteStore(url)
    user_files = {
        "notes.txt": b"mine",
        "model.safetensors": b"weights",
        "checkpoints/checkpoint_0/x": b"old",
    }
    for name, raw in user_files.items():
        store.fs.pipe_file(store.join_path(name), raw)
    for _ in range(2):
        run.accelerator.save_state(url)
        run.step()
        assert {
            name: store.fs.cat_file(store.join_path(name)) for name in user_files
        } == user_files
    run.accelerator.load_state(url)

    def failing(*_: object) -> None:
        raise ValueError("this hook fails")

    run.accelerator.register_save_state_pre_hook(failing)
    with pytest.raises(CheckpointError):
        run.accelerator.save_state(url)
    assert {
        name: store.fs.cat_file(store.join_path(name)) for name in user_files
    } == user_files
    run.accelerator.load_state(url)


def test_urls_are_not_taken_for_local_folders(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ArgumentError, match="local folders only"):
        run.accelerator.save_model(run.model, "s3://bucket/model")
    with pytest.raises(ArgumentError, match="local folders only"):
        run.accelerator.save({"x": 1}, "s3://bucket/x.pt")
    assert not (tmp_path / "s3:").exists()
