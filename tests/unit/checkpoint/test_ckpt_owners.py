"""Saves side by side: each has a draft, numbers are given once, and only drafts of dead processes are removed."""

from __future__ import annotations

import errno
import fcntl
import multiprocessing
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hasten import Accelerator, ProjectConfiguration
from hasten.checkpoint.base import Blob, CheckpointStore, Component, StateTree
from hasten.checkpoint.format.manifest import (
    DRAFT_PREFIX,
    Manifest,
    checkpoint_number,
    numbered_checkpoint,
)
from hasten.checkpoint.retention import retire_expired
from hasten.checkpoint.save import save_tree
from hasten.checkpoint.store.disk import Disk
from hasten.checkpoint.store.drafts import LOCK_NAME, TRASH_PREFIX
from hasten.checkpoint.store.local_store import LocalStore, folder_lock, open_store
from hasten.comm.local import LocalComm
from hasten.errors import CheckpointBusyError, CheckpointError
from hasten.extension import offers
from hasten.state.load_source import is_complete

TREE = StateTree(
    {
        "model": Component({"w": torch.ones(5)}, None, "model"),
        "x": Component({}, {"a": 1}),
    }
)


def save(store: CheckpointStore, name: str) -> None:
    save_tree(store, name, TREE, Manifest(number=checkpoint_number(name)), LocalComm())


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture(params=["local", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[CheckpointStore]:
    """An empty store of either kind."""
    if request.param == "local":
        yield LocalStore(tmp_path / "run")
        return
    if "url" not in offers("stores"):
        pytest.skip("no extension provides storage at URLs")
    fsspec = pytest.importorskip("fsspec")
    yield open_store("memory://owners/run")
    if fsspec.filesystem("memory").exists("/owners"):
        fsspec.filesystem("memory").rm("/owners", recursive=True)


# -- saves side by side --------------------------------------------------------------------------------------------
def test_a_save_beside_another_that_is_under_way_touches_nothing_of_it(
    tmp_path: Path,
) -> None:
    """The hook of one run does what another process would: it saves into a sibling folder meanwhile."""
    first, second = Accelerator(cpu=True), Accelerator(cpu=True)
    for accelerator in (first, second):
        accelerator.prepare(nn.Linear(2, 2))

    def hook(
        models: list[nn.Module], weights: list[dict[str, Any]], folder: str
    ) -> None:
        (Path(folder) / "early.txt").write_text("here")
        for sibling_name in ("trial_1", "trial_00", "trial_0x", "other"):
            second.save_state(tmp_path / "sweep" / sibling_name)

    first.register_save_state_pre_hook(hook)
    checkpoint_folder = Path(first.save_state(tmp_path / "sweep" / "trial_0"))
    assert (checkpoint_folder / "early.txt").read_text() == "here"
    assert names_in(tmp_path / "sweep") == [
        "other",
        "trial_0",
        "trial_00",
        "trial_0x",
        "trial_1",
    ]
    for name in names_in(tmp_path / "sweep"):
        first.load_state(tmp_path / "sweep" / name)


def test_every_save_of_the_same_name_is_whole_and_the_last_commit_stays(
    store: CheckpointStore,
) -> None:
    earlier = store.begin("best")
    save(store, "best")
    assert is_complete(store, "best")
    assert earlier.folder is not None
    earlier.put({"part": Blob([b"abc"], 3)})
    save(store, "best")
    earlier.abort()
    assert is_complete(store, "best")


def test_numbers_are_given_once(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "run")
    drafts = [store.begin_numbered(0) for _ in range(3)]
    assert [draft.name for draft in drafts] == [
        numbered_checkpoint(0),
        numbered_checkpoint(1),
        numbered_checkpoint(2),
    ]
    save(store, numbered_checkpoint(7))
    drafts.append(store.begin_numbered(2))
    assert drafts[-1].name == numbered_checkpoint(8)
    for draft in drafts:
        draft.abort()


def _save_often(root: Path, value: float, queue: Any) -> None:
    accelerator = Accelerator(cpu=True, project_dir=str(root))
    model = accelerator.prepare(nn.Linear(3, 3, bias=False))
    for number in range(25):
        with torch.no_grad():
            model.weight.fill_(value + number)
        queue.put((accelerator.save_state(), value + number))


def test_two_runs_in_one_project_never_get_the_same_checkpoint(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    runs = [
        context.Process(target=_save_often, args=(tmp_path, 100.0 * run, queue))
        for run in (1, 2, 3)
    ]
    for run in runs:
        run.start()
    saved = [queue.get(timeout=60) for _ in range(75)]
    for run in runs:
        run.join()
    assert len({checkpoint_path for checkpoint_path, _ in saved}) == 75
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(nn.Linear(3, 3, bias=False))
    for checkpoint_path, value in saved:
        accelerator.load_state(checkpoint_path)
        assert model.weight.unique().tolist() == [value], (
            "what was reported as saved is what is there"
        )


def test_a_numbered_save_never_replaces_a_folder_that_appeared(tmp_path: Path) -> None:
    draft = LocalStore(tmp_path).begin_numbered(0)
    (tmp_path / numbered_checkpoint(0)).mkdir()
    (tmp_path / numbered_checkpoint(0) / "file").write_text("of another tool")
    files = tuple(draft.put({"part": Blob([b"abc"], 3)}).values())
    with pytest.raises(
        CheckpointError,
        match=r"another process has written .*checkpoint_0.*its own project_dir",
    ):
        draft.commit(Manifest(files=files))
    draft.abort()
    assert [path.name for path in tmp_path.rglob("*")] == [
        numbered_checkpoint(0),
        "file",
    ]


def test_a_run_says_when_it_meets_checkpoints_of_another(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = Accelerator(cpu=True, project_dir=str(tmp_path))
    first.save_state()
    first.save_state()
    assert not caplog.text
    project = ProjectConfiguration(project_dir=str(tmp_path), total_limit=1)
    second = Accelerator(cpu=True, project_config=project)
    second.save_state()
    assert (
        "holds checkpoints up to checkpoint_1 that this run neither wrote nor loaded"
        in caplog.text
    )
    caplog.clear()
    second.save_state()
    assert not caplog.text
    assert names_in(tmp_path / "checkpoints") == [
        numbered_checkpoint(0),
        numbered_checkpoint(1),
        numbered_checkpoint(3),
    ], "those of the first run stay"
    resumed = Accelerator(cpu=True, project_config=project)
    resumed.load_state()
    resumed.save_state()
    assert not caplog.text
    assert names_in(tmp_path / "checkpoints") == [
        numbered_checkpoint(0),
        numbered_checkpoint(1),
        numbered_checkpoint(4),
    ], "it continues the second run"


# -- leftovers -----------------------------------------------------------------------------------------------------
def test_an_abandoned_draft_is_removed_by_the_next_save(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    draft = store.begin("best")
    draft.put({"part": Blob([b"abc"], 3)})
    del draft
    save(store, "other")
    assert names_in(tmp_path) == ["other"]


def test_drafts_of_living_processes_stay_and_those_of_dead_ones_go(
    tmp_path: Path,
) -> None:
    (tmp_path / "best").mkdir()
    for base in (tmp_path, tmp_path / "best"):
        for token in ("0" * 12, "1" * 12):
            (base / f"{DRAFT_PREFIX}{token}" / "best").mkdir(parents=True)
            (base / f"{DRAFT_PREFIX}{token}" / LOCK_NAME).touch()
        (base / f"{TRASH_PREFIX}{'2' * 12}").mkdir()
    lock_files = [
        base / f"{DRAFT_PREFIX}{'1' * 12}" / LOCK_NAME
        for base in (tmp_path, tmp_path / "best")
    ]
    holder = subprocess.Popen(
        ["python3", "-c", "import fcntl, sys\n"
         "files = [open(name) for name in sys.argv[1:]]\n"
         "[fcntl.flock(file, fcntl.LOCK_EX) for file in files]\nprint(1, flush=True)\nsys.stdin.read()", *lock_files],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    with holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        save(LocalStore(tmp_path), "best")
        assert names_in(tmp_path) == [f"{DRAFT_PREFIX}{'1' * 12}", "best"]
        assert f"{DRAFT_PREFIX}{'1' * 12}" in names_in(tmp_path / "best")
        holder.kill()
    save(LocalStore(tmp_path), "best")
    assert names_in(tmp_path) == ["best"]
    assert not list(tmp_path.rglob(".hasten*"))


def test_without_flock_drafts_are_kept_for_a_day(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", unsupported)
    store = LocalStore(tmp_path)
    draft = store.begin("best")
    save(store, "other")
    assert draft.folder.is_dir()
    draft.abort()
    abandoned = store.begin("best")
    lock_file = abandoned.folder.parent / LOCK_NAME
    two_days_ago = time.time() - 2 * 24 * 3600
    os.utime(lock_file, (two_days_ago, two_days_ago))
    save(store, "other")
    assert names_in(tmp_path) == ["other"]


def test_a_forked_copy_does_not_release_the_lock(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    draft = store.begin("best")
    pid = os.fork()
    if pid == 0:
        draft.abort = None  # type: ignore[method-assign,assignment]
        draft._release()  # as if the copy went out of scope
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    save(store, "other")
    assert draft.folder.is_dir()
    draft.abort()


# -- the lock of a folder ------------------------------------------------------------------------------------------
def test_the_lock_admits_one_at_a_time_and_leaves_no_file(tmp_path: Path) -> None:
    num_inside, most_inside = 0, 0
    guard = threading.Lock()

    def lock_often() -> None:
        nonlocal num_inside, most_inside
        for _ in range(10):
            with folder_lock(tmp_path, Disk()):
                with guard:
                    num_inside += 1
                    most_inside = max(most_inside, num_inside)
                time.sleep(0.001)
                with guard:
                    num_inside -= 1

    threads = [threading.Thread(target=lock_often) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most_inside == 1
    assert names_in(tmp_path) == []


def test_a_lock_that_is_not_released_is_an_error_that_names_it(tmp_path: Path) -> None:
    expected = r"kept .* locked for .*stopped process .*another folder"
    with (
        folder_lock(tmp_path, Disk()),
        pytest.raises(CheckpointBusyError, match=expected),
    ):
        folder_lock(tmp_path, Disk(), 0.05).__enter__()
    save(LocalStore(tmp_path), "best")
    assert names_in(tmp_path) == ["best"]


def test_the_lock_of_a_killed_process_is_free(tmp_path: Path) -> None:
    pid = os.fork()
    if pid == 0:
        with folder_lock(tmp_path, Disk()):
            os.kill(os.getpid(), signal.SIGKILL)
        os._exit(0)
    os.waitpid(pid, 0)
    assert names_in(tmp_path) == [LOCK_NAME]
    save(LocalStore(tmp_path), "best")
    assert names_in(tmp_path) == ["best"]


# -- commits and retention -----------------------------------------------------------------------------------------
def test_files_that_disappear_before_the_commit_are_an_error(tmp_path: Path) -> None:
    draft = LocalStore(tmp_path).begin("best")
    files = tuple(draft.put({"part": Blob([b"abc"], 3)}).values())
    (draft.folder / "part").unlink()
    with pytest.raises(CheckpointError, match=r"part disappeared from .*save again"):
        draft.commit(Manifest(files=files))
    draft.abort()
    assert names_in(tmp_path) == []


def test_retention_deletes_what_it_is_allowed_to(store: CheckpointStore) -> None:
    for number in range(4):
        save(store, numbered_checkpoint(number))
    retire_expired(
        store,
        ProjectConfiguration(total_limit=1),
        lambda manifest: manifest.number != 1,
    )
    assert store.names() == [numbered_checkpoint(1), numbered_checkpoint(3)]


class StillOpen(Disk):
    """A file system that hides an open file in its folder instead of removing it, as FUSE and NFS do."""

    def remove_tree(self, path: Path) -> None:
        open_files = list(Path("/proc/self/fd").iterdir())
        in_use = any(
            file.exists() and file.resolve().is_relative_to(path) for file in open_files
        )
        if in_use or (path.name.startswith(TRASH_PREFIX) and path.is_dir()):
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY))
        super().remove_tree(path)


def test_saves_close_their_files_before_they_remove_folders(tmp_path: Path) -> None:
    for _ in range(2):  # where there is nothing yet, and over what is there
        save(LocalStore(tmp_path, StillOpen()), "best")
        assert not list(tmp_path.rglob(".hasten*"))
    LocalStore(tmp_path, StillOpen()).begin("best").abort()
    assert not list(tmp_path.rglob(".hasten*"))


def test_a_file_that_is_still_open_is_removed_later_without_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(3):
        save(LocalStore(tmp_path, StillOpen()), numbered_checkpoint(number))
        retire_expired(
            LocalStore(tmp_path, StillOpen()),
            ProjectConfiguration(total_limit=1),
            lambda manifest: True,
        )
    assert not caplog.text
    save(LocalStore(tmp_path), numbered_checkpoint(3))
    assert names_in(tmp_path) == [numbered_checkpoint(2), numbered_checkpoint(3)]


def test_names_may_be_as_long_as_the_file_system_allows(tmp_path: Path) -> None:
    name = "ü" * 120
    save(LocalStore(tmp_path), name)
    save(LocalStore(tmp_path), name)
    assert names_in(tmp_path) == [name]


def test_a_joined_draft_has_no_lock(tmp_path: Path) -> None:
    draft = LocalStore(tmp_path).begin("best")
    joined = LocalStore(tmp_path).join("best", draft.token)
    assert joined is not None
    assert joined.folder == draft.folder
    del joined
    save(LocalStore(tmp_path), "other")
    assert draft.folder.is_dir()
    assert LocalStore(tmp_path).join("best", "absent") is None
    draft.abort()
