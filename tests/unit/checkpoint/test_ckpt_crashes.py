"""Crashes, full disks and hostile files, tried by the hundred in processes of their own."""

from __future__ import annotations

import errno
import json
import os
import resource
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from hasten.checkpoint.base import Component, StateTree
from hasten.checkpoint.format.manifest import Manifest, numbered_checkpoint
from hasten.checkpoint.reader import open_checkpoint
from hasten.checkpoint.save import save_tree
from hasten.checkpoint.store.disk import Disk
from hasten.checkpoint.store.local_store import LocalStore
from hasten.comm.local import LocalComm
from hasten.errors import CheckpointError
from hasten.state.load_source import find_newest

TEST_FOLDER = Path(__file__).parent
KILLS = {"numbered": 160, "overwriting": 300, "halfway": 150}


def run(script: str, *arguments: str, timeout_s: float = 220) -> Any:
    """What a script of this folder prints, decoded."""
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-X",
        "faulthandler",
        str(TEST_FOLDER / script),
        *arguments,
    ]
    completed = subprocess.run(
        command, capture_output=True, text=True, timeout=timeout_s, check=False
    )
    assert completed.returncode == 0, completed.stderr[-3000:]
    return json.loads(completed.stdout)


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("stride", "save_kinds"),
    [
        (10, tuple(KILLS)),
        *(
            pytest.param(1, (save_kind,), id=save_kind, marks=pytest.mark.exhaustive)
            for save_kind in KILLS
        ),
    ],
)
def test_every_kill_leaves_the_newest_complete_checkpoint_whole(
    stride: int, save_kinds: tuple[str, ...]
) -> None:
    """Together at least 600 kills, one for every change of the disk and every way to die there; or every tenth of them."""
    report = run("power_cuts.py", str(stride), *save_kinds)
    assert report["problems"] == []
    assert all(
        report["kills"][save_kind] >= KILLS[save_kind] // stride
        for save_kind in save_kinds
    ), report["kills"]


LONG = (
    pytest.mark.slow,
    pytest.mark.timeout(2500),
    pytest.mark.skipif(
        not os.environ.get("HASTEN_LONG_TESTS"),
        reason="takes minutes; set HASTEN_LONG_TESTS=1",
    ),
)


@pytest.mark.parametrize(
    ("seconds", "least"),
    [
        pytest.param(1.5, 20, id="short", marks=pytest.mark.timeout(240)),
        pytest.param(60, 700, id="long", marks=LONG),
    ],
)
def test_saves_side_by_side_are_whole_or_say_why_not(
    seconds: float, least: int
) -> None:
    """Into sibling folders, into the same folder, and with kills: together over 2000 saves in the long version."""
    reports = run(
        "side_by_side.py",
        str(seconds),
        str(least),
        timeout_s=220 if seconds < 10 else 2400,
    )
    assert [report["problems"] for report in reports] == [[], [], []]
    assert all(report["counts"]["saved"] >= least for report in reports)
    assert reports[2]["kills"] >= 2


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("rounds", "least"),
    [(20, 200), pytest.param(100, 300, marks=pytest.mark.exhaustive)],
)
def test_hostile_files_run_no_code_and_end_in_typed_errors(
    rounds: int, least: int
) -> None:
    report = run("hostile_files.py", str(rounds))
    assert report["problems"] == []
    assert report["files"] >= least
    assert report["outcomes"]["UnsafeCheckpointError"] >= 40


def save(root: Path, number: int, disk: Disk | None = None) -> None:
    store = LocalStore(root, disk, threads=1)
    tree = StateTree(
        {
            "model": Component(
                {"w": torch.full((200_000,), float(number))}, None, "model"
            )
        }
    )
    save_tree(
        store, numbered_checkpoint(number), tree, Manifest(number=number), LocalComm()
    )


class FullDisk(Disk):
    """Has room for so many bytes, then for none, as a disk that is full; writes what still fits."""

    def __init__(self, room: int, error: int = errno.ENOSPC) -> None:
        self._room = room
        self._error = error

    def write_at(self, fd: int, data: Sequence[memoryview], offset: int) -> int:
        fits = memoryview(b"".join(data))[: max(self._room, 0)]
        if not fits:
            raise OSError(self._error, os.strerror(self._error))
        self._room -= len(fits)
        return super().write_at(fd, [fits], offset)


@pytest.mark.parametrize("room", [0, 1, 1000, 400_000, 800_200])
@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_full_disk_keeps_the_old_checkpoint_and_leaves_nothing(
    tmp_path: Path, room: int, error: int
) -> None:
    save(tmp_path, 0)
    with pytest.raises(CheckpointError, match=r"writing|committing"):
        save(tmp_path, 1, FullDisk(room, error))
    store = LocalStore(tmp_path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["checkpoint_0"]
    with open_checkpoint(store, "checkpoint_0", LocalComm()) as checkpoint:
        assert checkpoint.component("model").pieces["w"][0].data[0] == 0.0
    save(tmp_path, 1)
    assert find_newest(store) == "checkpoint_1"


def test_real_limit_of_file_size_is_a_typed_error(tmp_path: Path) -> None:
    save(tmp_path, 0)
    initial_limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, initial_limits[1]))
    try:
        with pytest.raises(CheckpointError, match="File too large"):
            save(tmp_path, 1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, initial_limits)
    assert find_newest(LocalStore(tmp_path)) == "checkpoint_0"


def test_folder_that_cannot_be_written_is_a_typed_error(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    # root may write anywhere, so a read-only mode would not stop these tests
    blocked.write_text("not a folder")
    with pytest.raises(
        CheckpointError, match=r"cannot start the checkpoint .*Give a folder"
    ):
        save(blocked, 0)

    class ReadOnly(Disk):
        def make_folder(self, path: Path) -> None:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    with pytest.raises(CheckpointError, match="Read-only file system"):
        save(tmp_path, 0, ReadOnly())


class Recorder(Disk):
    """Notes the order of calls."""

    def __init__(self) -> None:
        self.log: list[tuple[str, str]] = []
        self._names: dict[int, str] = {}

    def create(self, path: Path) -> int:
        fd = super().create(path)
        self._names[fd] = path.name
        self.log.append(("create", path.name))
        return fd

    def write_at(self, fd: int, data: Sequence[memoryview], offset: int) -> int:
        self.log.append(("write", self._names[fd]))
        return super().write_at(fd, data, offset)

    def sync(self, fd: int) -> None:
        self.log.append(("sync", self._names.get(fd, "folder")))
        super().sync(fd)

    def close(self, fd: int) -> None:
        self._names.pop(fd, None)
        super().close(fd)

    def rename(self, old: Path, new: Path) -> None:
        self.log.append(("rename", new.name))
        super().rename(old, new)


def test_everything_is_synced_before_the_rename_and_the_rename_after(
    tmp_path: Path,
) -> None:
    disk = Recorder()
    save(tmp_path, 0, disk)
    log = disk.log
    renamed = log.index(("rename", "checkpoint_0"))
    names = {name for call, name in log if call == "create"}
    assert names == {"model.safetensors", "manifest.json"}
    for name in names:
        last_write = max(i for i, entry in enumerate(log) if entry == ("write", name))
        assert any(entry == ("sync", name) for entry in log[last_write:renamed]), name
    last_file = max(i for i, (call, _) in enumerate(log[:renamed]) if call == "create")
    assert ("sync", "folder") in log[last_file:renamed], (
        "the list of names must be on the disk too"
    )
    assert ("sync", "folder") in log[renamed:], "the rename itself must be on the disk"
    assert log.index(("create", "manifest.json")) > log.index(
        ("sync", "model.safetensors")
    ), "the manifest comes last"
