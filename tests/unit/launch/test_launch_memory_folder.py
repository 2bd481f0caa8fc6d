"""The launcher's folder in memory: private, gone with the launcher, and cleared up after one that was killed."""

from __future__ import annotations

import os
import signal
import stat
from pathlib import Path

from hasten.launch.run import memory_folder


def test_it_is_the_owners_alone_and_ends_with_the_block(tmp_path: Path) -> None:
    with memory_folder(tmp_path) as folder:
        assert folder is not None
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        (folder / "0" / "ranks_0-1").mkdir(parents=True)
        (folder / "0" / "ranks_0-1" / "state").write_bytes(b"x")
        with memory_folder(tmp_path) as second_folder:  # another job of the same user
            assert second_folder != folder
        assert folder.exists()
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_launcher_left_is_removed_by_the_next(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    if not (child := os.fork()):
        with memory_folder(tmp_path) as folder:
            os.write(writing, str(folder).encode())
            signal.pause()
    left = Path(os.read(reading, 4096).decode())
    with memory_folder(tmp_path):
        assert left.exists()  # its launcher runs
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(reading)
    os.close(writing)
    assert left.exists()
    with memory_folder(tmp_path):
        assert not left.exists()


def test_without_memory_for_files_there_is_none(tmp_path: Path) -> None:
    with memory_folder(tmp_path / "nowhere") as folder:
        assert folder is None
