"""save_state and load_state of one process: files, names, strictness, and the ends of a process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hasten import Accelerator
from hasten.checkpoint import reader
from hasten.checkpoint.store.local_store import LocalStore
from hasten.errors import (
    CheckpointError,
    ConfigError,
    CorruptCheckpointError,
    IncompleteCheckpointError,
)
from hasten.state.load_source import find_newest, is_complete
from hasten.state.preemption import stop_reason


class Tied(nn.Module):
    """Two names for one weight, a buffer, and extra state."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width, bias=False)
        self.outer = nn.Linear(width, width, bias=False)
        self.outer.weight = self.inner.weight
        self.register_buffer("count", torch.zeros(()))
        self.note: Any = {"seen": 0}

    def get_extra_state(self) -> Any:
        return self.note

    def set_extra_state(self, state: Any) -> None:
        self.note = state

    def forward(self, x: torch.Tensor) -> Any:
        return self.outer(self.inner(x))


class Counter:
    """A registered object with all kinds of values."""

    def __init__(self) -> None:
        self.value: Any = {"n": 3, "t": torch.arange(3), 5: (1, None)}

    def state_dict(self) -> Any:
        return self.value

    def load_state_dict(self, state: Any) -> None:
        self.value = state


def make_run(
    folder: Path, width: int = 4, **settings: Any
) -> tuple[Accelerator, Any, Any]:
    accelerator = Accelerator(cpu=True, project_dir=str(folder), **settings)
    torch.manual_seed(0)
    model = Tied(width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return accelerator, *accelerator.prepare(model, optimizer)


def step(accelerator: Accelerator, model: Any, optimizer: Any) -> None:
    accelerator.backward(model(torch.ones(2, 4)).pow(2).sum())
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("safe", [True, False])
def test_everything_comes_back_under_familiar_names(tmp_path: Path, safe: bool) -> None:
    accelerator, model, optimizer = make_run(tmp_path, mixed_precision="fp16")
    scheduler = accelerator.prepare(
        torch.optim.lr_scheduler.LambdaLR(optimizer.optimizer, lambda epoch: 0.5**epoch)
    )
    counter = Counter()
    accelerator.register_for_checkpointing(counter)
    step(accelerator, model, optimizer)
    scheduler.step()
    model.note = {"seen": 9, "t": torch.ones(2)}
    checkpoint_folder = Path(accelerator.save_state(safe_serialization=safe))
    weights = "model.safetensors" if safe else "pytorch_model.bin"
    names = {path.name for path in checkpoint_folder.iterdir()}
    assert {
        weights,
        "optimizer.bin",
        "scheduler.bin",
        "scaler.pt",
        "random_states_0.safetensors",
    } <= names
    assert {"manifest.json", "custom_checkpoint_0.safetensors"} <= names
    saved = {
        key: value.clone()
        for key, value in model.state_dict().items()
        if isinstance(value, torch.Tensor)
    }
    moments = [v.clone() for s in optimizer.state.values() for v in s.values()]
    rate = optimizer.param_groups[0]["lr"]

    resumed, model, optimizer = make_run(tmp_path, mixed_precision="fp16")
    scheduler = resumed.prepare(
        torch.optim.lr_scheduler.LambdaLR(optimizer.optimizer, lambda epoch: 0.5**epoch)
    )
    counter = Counter()
    counter.value = None
    resumed.register_for_checkpointing(counter)
    resumed.load_state()
    assert all(
        torch.equal(model.state_dict()[key], value) for key, value in saved.items()
    )
    assert model.outer.weight is model.inner.weight, "ties are kept"
    assert model.note["seen"] == 9
    assert torch.equal(model.note["t"], torch.ones(2))
    assert all(
        torch.equal(a, b)
        for a, b in zip(
            moments,
            (v for s in optimizer.state.values() for v in s.values()),
            strict=True,
        )
    )
    assert optimizer.param_groups[0]["lr"] == rate
    assert counter.value["n"] == 3
    assert counter.value[5] == (1, None)
    assert torch.equal(counter.value["t"], torch.arange(3))


def test_strictness_says_what_differs_and_changes_nothing(tmp_path: Path) -> None:
    accelerator, model, optimizer = make_run(tmp_path)
    step(accelerator, model, optimizer)
    checkpoint_folder = accelerator.save_state(tmp_path / "out")

    wide, wide_model, _ = make_run(tmp_path, width=5)
    initial_weight = wide_model.inner.weight.detach().clone()
    with pytest.raises(
        CheckpointError,
        match=r"inner\.weight has shape \(5, 5\) here and \(4, 4\) in the checkpoint",
    ):
        wide.load_state(checkpoint_folder)
    assert torch.equal(wide_model.inner.weight, initial_weight)

    plain = Accelerator(cpu=True)
    extra = nn.Sequential(nn.Linear(4, 4))
    plain.prepare(extra)
    with pytest.raises(
        CheckpointError,
        match=r"lacks 0\.bias, 0\.weight and has _extra_state, count, inner\.weight",
    ):
        plain.load_state(checkpoint_folder)

    half = Accelerator(cpu=True)
    model16 = half.prepare(Tied().to(torch.bfloat16))
    with pytest.raises(
        CheckpointError,
        match=r"is torch\.bfloat16 here and torch\.float32 in the checkpoint",
    ):
        half.load_state(checkpoint_folder)
    half.load_state(checkpoint_folder, strict=False)
    assert torch.equal(model16.inner.weight, model.inner.weight.to(torch.bfloat16))


def test_only_complete_checkpoints_are_chosen(tmp_path: Path) -> None:
    accelerator, model, optimizer = make_run(tmp_path)
    with pytest.raises(IncompleteCheckpointError, match="there is no checkpoint in"):
        accelerator.load_state()
    accelerator.save_state()
    step(accelerator, model, optimizer)
    accelerator.save_state()
    root = tmp_path / "checkpoints"
    (root / "checkpoint_1" / "optimizer.bin").unlink()
    (root / "checkpoint_7").mkdir()
    assert find_newest(LocalStore(root)) == "checkpoint_0"
    accelerator.load_state()
    with pytest.raises(IncompleteCheckpointError, match=r"optimizer\.bin is missing"):
        accelerator.load_state(root / "checkpoint_1")
    with pytest.raises(
        IncompleteCheckpointError, match=r"manifest\.json does not exist"
    ):
        accelerator.load_state(root / "checkpoint_7")
    file = root / "checkpoint_0" / "model.safetensors"
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 255
    file.write_bytes(bytes(raw))
    weight = model.inner.weight.detach().clone()
    with pytest.raises(
        CorruptCheckpointError, match=r"model\.safetensors has a wrong checksum"
    ):
        accelerator.load_state(root / "checkpoint_0")
    assert torch.equal(model.inner.weight, weight)


def test_settings_that_cannot_be_honoured(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="set project_dir"):
        Accelerator(cpu=True).save_state()
    with pytest.raises(
        ConfigError, match=r"a object cannot be registered.*Add both methods"
    ):
        Accelerator(cpu=True).register_for_checkpointing(object())
    accelerator, _, _ = make_run(tmp_path)

    class Unstorable(Counter):
        def state_dict(self) -> Any:
            return {"fn": print}

    accelerator.register_for_checkpointing(Unstorable())
    with pytest.raises(
        CheckpointError,
        match=r"Unstorable/fn holds a builtins\.builtin_function_or_method",
    ):
        accelerator.save_state()


def test_saving_into_a_folder_that_exists_keeps_the_users_files(tmp_path: Path) -> None:
    accelerator, _, _ = make_run(tmp_path)
    out = tmp_path / "out"
    out.mkdir()
    (out / "config.json").write_text("{}")
    for _ in range(2):
        accelerator.save_state(out)
        assert (out / "config.json").read_text() == "{}"
        accelerator.load_state(out)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


TERMINATED_RUNS = """
import os, signal, sys, time, torch
from hasten import Accelerator
from hasten.checkpoint.async_writer import AsyncWriter
from hasten.checkpoint.store.disk import Disk
slow = Disk.sync
def sync(self, fd):
    time.sleep(0.15)
    slow(self, fd)
Disk.sync = sync
for end in sys.argv[2:]:  # in a process each, which share their imports
    if not (child := os.fork()):
        break
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
else:
    sys.exit()
accelerator = Accelerator(cpu=True)
model, optimizer = accelerator.prepare(*(lambda m: (m, torch.optim.AdamW(m.parameters())))(torch.nn.Linear(50, 50)))
if end == "starting":
    submit = AsyncWriter.submit
    def signalled(*args):
        go = submit(*args)
        print(os.getpid(), flush=True)
        os.kill(os.getpid(), signal.SIGTERM)
        return go
    AsyncWriter.submit = signalled
accelerator.save_state(sys.argv[1] + "/" + end, blocking=False)
print(os.getpid(), flush=True)
if end == "computing":
    for _ in range(600):  # Python runs handlers between two calls: a signal just before a long one would wait for it
        time.sleep(0.1)
elif end == "waiting":
    accelerator.wait_for_saves()
elif end == "ending":
    accelerator.end_training()
elif end == "saving":
    accelerator.save_state(sys.argv[1] + "/next")
time.sleep(0 if end == "exit" else 60)
"""


def test_a_save_in_flight_is_finished_at_exit_and_on_a_signal_at_any_moment(
    tmp_path: Path,
) -> None:
    signalled = ("computing", "waiting", "ending", "saving", "starting")
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-c",
        TERMINATED_RUNS,
        str(tmp_path),
        "exit",
        *signalled,
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for end in ("exit", *signalled):
            saving = int(process.stdout.readline())
            assert not (tmp_path / end).exists(), "it is still being written"
            if end in signalled[:-1]:
                time.sleep(0.05)
                os.kill(saving, signal.SIGTERM)
            assert int(process.stdout.readline()) == (
                0 if end == "exit" else -signal.SIGTERM
            ), end
            assert is_complete(LocalStore(tmp_path), end)
        assert process.wait(timeout=60) == 0


def test_an_error_in_the_background_comes_up_at_the_next_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    accelerator, _, _ = make_run(tmp_path)

    def write_to_full_disk(fd: int, buffers: Any, offset: int) -> int:
        time.sleep(0.05)
        raise OSError(28, "No space left on device")

    accelerator.save_state()
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", write_to_full_disk)
        accelerator.save_state(blocking=False)
        with pytest.raises(CheckpointError, match="No space left"):
            accelerator.wait_for_saves()
        accelerator.save_state(blocking=False)
        with pytest.raises(CheckpointError, match="No space left"):
            accelerator.save_state()
    accelerator.save_state()
    accelerator.end_training()
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == [
        "checkpoint_0",
        "checkpoint_1",
    ]


PREEMPTED = """
import os, signal, sys, torch
from torch.utils.data import DataLoader, TensorDataset
from hasten import PREEMPTED_EXIT_CODE, Accelerator

def train(folder, how):
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, project_dir=folder)
    model = torch.nn.Sequential(torch.nn.Linear(1, 4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 1))
    data = DataLoader(TensorDataset(torch.arange(12.0).reshape(-1, 1)), shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters()), data)
    if how == "again":
        accelerator.load_state()
    for (x,) in loader:
        loss = model(x).pow(2).mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        print(int(x), loss.item(), flush=True)
        if how == "stop" and optimizer.num_updates == 5:
            os.kill(os.getpid(), signal.SIGTERM)
        if accelerator.preempted:
            accelerator.save_state()
            sys.exit(PREEMPTED_EXIT_CODE)

for how in sys.argv[2:]:
    train(sys.argv[1], how)
    print("--")
"""


def test_who_told_the_run_to_stop_is_said_in_words() -> None:
    stop_reasons = [stop_reason(number, 3) for number in (-1, signal.SIGTERM)]
    assert stop_reasons == [
        f"rank 3 was told to stop by {stop_source}"
        for stop_source in ("the program itself", "SIGTERM")
    ]


@pytest.mark.exhaustive  # test_launch_preemption.py does it through the launcher
def test_a_preempted_run_continues_at_the_same_sample(tmp_path: Path) -> None:
    def run(*program_words: str) -> tuple[int, str]:
        command = [
            sys.executable,
            "-W",
            "ignore",
            "-c",
            PREEMPTED,
            str(tmp_path),
            *program_words,
        ]
        completed = subprocess.run(
            command, capture_output=True, text=True, timeout=100, check=False
        )
        return completed.returncode, completed.stdout

    code, first = run("stop")
    assert code == 85
    assert first.count("\n") == 5
    code, resumed_output = run("again", "whole")
    assert code == 0
    second, uninterrupted, _ = resumed_output.split("--\n")
    assert first + second == uninterrupted, (
        "sample by sample and loss by loss as if never stopped"
    )


@pytest.mark.parametrize("exchange", ["replaced", "overwritten"])
def test_a_file_exchanged_after_it_was_verified_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchange: str
) -> None:
    accelerator, model, _ = make_run(tmp_path)
    accelerator.save_state(tmp_path / "out")
    initial_weights = {
        key: value.clone()
        for key, value in model.state_dict().items()
        if torch.is_tensor(value)
    }
    sound = reader.verify_files

    def then_exchanged(folder: Path, files: Any) -> list[str]:
        problems = sound(folder, files)
        path = folder / "model.safetensors"
        raw = path.read_bytes()[:-4] + b"\0\0\0\0"
        if exchange == "replaced":
            (folder / "other").write_bytes(raw)
            (folder / "other").rename(path)
        else:
            path.write_bytes(raw)
        return problems

    monkeypatch.setattr(reader, "verify_files", then_exchanged)
    with pytest.raises(
        CorruptCheckpointError, match=r"model\.safetensors: was replaced or changed"
    ):
        accelerator.load_state(tmp_path / "out")
    assert all(
        torch.equal(model.state_dict()[key], value)
        for key, value in initial_weights.items()
    )


@pytest.mark.parametrize("blocking", [True, False])
def test_buffers_that_are_conjugate_views_come_back(
    tmp_path: Path, blocking: bool
) -> None:
    accelerator = Accelerator(cpu=True)
    turns = torch.polar(torch.ones(40), torch.arange(40.0))
    model = nn.Linear(2, 2)
    model.register_buffer("turns", turns.conj())
    model = accelerator.prepare(model)
    accelerator.save_state(tmp_path / "out", blocking=blocking)
    accelerator.wait_for_saves()
    model.turns.zero_()
    accelerator.load_state(tmp_path / "out")
    assert torch.equal(model.turns.resolve_conj(), turns.conj().resolve_conj())
