"""Who may write and who may clear up: live owners are left alone, dead ones leave nothing behind."""

from __future__ import annotations

import ctypes
import fcntl
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

from hasten import Accelerator
from hasten.checkpoint.base import Blob, CheckpointStore, Component, StateTree
from hasten.checkpoint.format.manifest import Manifest
from hasten.checkpoint.store.disk import Disk
from hasten.checkpoint.store.local_store import LocalStore, same_family
from hasten.checkpoint.store.locate import number_of, numbered
from hasten.checkpoint.store.locks import (
    Liveness,
    LocalLocks,
    LockTimeouts,
    Owner,
    acquire,
    decode_owner,
    encode_owner,
    hidden,
    liveness,
    parse_hidden,
    tag_of,
    this_process,
)
from hasten.checkpoint.store.remote_store import RemoteStore
from hasten.checkpoint.store.retention import Retention
from hasten.checkpoint.writer import finish, prepare, retire_expired, start
from hasten.comm.local import LocalComm
from hasten.errors import CheckpointBusyError, CheckpointError

TREE = StateTree({"model": Component({"w": torch.ones(5)}, None, "model"), "x": Component({}, {"a": 1})})
TOKEN = "0123456789ab"


def save(store: CheckpointStore, name: str) -> None:
    group = start(store, LocalComm(), name)
    finish(prepare(TREE, group, LocalComm()), group, LocalComm(), Manifest(number=number_of(name)))


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture(params=["local", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[CheckpointStore]:
    """An empty store of either kind, with little patience."""
    timeouts = LockTimeouts(beat_s=0.05, stale_s=1.0)
    if request.param == "local":
        yield LocalStore(tmp_path / "run", timeouts=timeouts)
        return
    fsspec = pytest.importorskip("fsspec")
    yield RemoteStore("memory://owners/run", timeouts=timeouts)
    if fsspec.filesystem("memory").exists("/owners"):
        fsspec.filesystem("memory").rm("/owners", recursive=True)


# -- siblings ------------------------------------------------------------------------------------------------------
def test_a_save_beside_another_that_is_under_way_touches_nothing_of_it(tmp_path: Path) -> None:
    """The hook of one run does what another process would: it saves into a sibling folder meanwhile."""
    first, second = Accelerator(cpu=True), Accelerator(cpu=True)
    for accelerator in (first, second):
        accelerator.prepare(nn.Linear(2, 2))

    def hook(models: list[nn.Module], weights: list[dict[str, Any]], folder: str) -> None:
        (Path(folder) / "early.txt").write_text("here")
        for other in ("trial_1", "trial_00", "trial_0x", "other"):
            second.save_state(tmp_path / "sweep" / other)

    first.register_save_state_pre_hook(hook)
    place = Path(first.save_state(tmp_path / "sweep" / "trial_0"))
    assert (place / "early.txt").read_text() == "here"
    assert names_in(tmp_path / "sweep") == ["other", "trial_0", "trial_00", "trial_0x", "trial_1"]
    for name in names_in(tmp_path / "sweep"):
        first.load_state(tmp_path / "sweep" / name)


def test_numbered_runs_in_one_folder_leave_each_others_drafts_alone(store: CheckpointStore) -> None:
    group = start(store, LocalComm(), numbered(3))
    save(store, numbered(4))
    finish(prepare(TREE, group, LocalComm()), group, LocalComm(), Manifest(number=3))
    assert store.names() == [numbered(3), numbered(4)]
    assert all(store.complete(name) for name in store.names())


@pytest.mark.parametrize(
    ("name", "other", "same"),
    [
        ("checkpoint_3", "checkpoint_12", True),
        ("best", "best", True),
        ("trial_0", "trial_1", False),
        ("checkpoint-10", "checkpoint-20", False),
        ("checkpoint_3", "checkpoint_3x", False),
    ],
)
def test_families(name: str, other: str, same: bool) -> None:
    assert same_family(name, other) is same


def test_a_dead_siblings_leftovers_stay_unless_numbered_automatically(tmp_path: Path) -> None:
    for name in ("trial_1", numbered(1)):
        draft = tmp_path / hidden("draft", name, TOKEN) / name
        draft.mkdir(parents=True)
        (draft / "part").write_text("x")
        (tmp_path / hidden("lock", name, TOKEN)).write_bytes(encode_owner(gone()))
    save(LocalStore(tmp_path), "trial_0")
    assert len(names_in(tmp_path)) == 5, "not of the same run"
    save(LocalStore(tmp_path), numbered(2))
    left = {entry.tag for name in names_in(tmp_path) if (entry := parse_hidden(name)) is not None}
    assert left == {"trial_1"}
    save(LocalStore(tmp_path), "trial_1")
    assert names_in(tmp_path) == [numbered(2), "trial_0", "trial_1"]


# -- one writer at a time ------------------------------------------------------------------------------------------
def test_a_second_writer_is_told_of_the_first(store: CheckpointStore) -> None:
    before = time.time()
    draft = store.begin("best")
    with pytest.raises(
        CheckpointBusyError, match=r"best is being written by this process itself .* since 20\d\d-"
    ) as caught:
        store.begin("best")
    assert caught.value.pid == os.getpid()
    assert caught.value.host == this_process().host
    assert before - 1 <= caught.value.since_s <= time.time()
    draft.abort()
    save(store, "best")
    draft = store.begin("best")  # now there is one to be replaced
    with pytest.raises(CheckpointBusyError, match="Wait for the other save, or save into another folder"):
        store.begin("best")
    with pytest.raises(CheckpointBusyError):
        store.delete("best")
    draft.abort()
    save(store, "best")
    assert store.complete("best")


def test_the_first_is_named_with_its_process(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "60"]) as child:
        lock = tmp_path / hidden("lock", "best", TOKEN)
        lock.write_bytes(encode_owner(msgspec.structs.replace(this_process(), pid=child.pid, started=0)))
        with pytest.raises(CheckpointBusyError, match=f"written by process {child.pid} on "):
            LocalStore(tmp_path).begin("best")
        child.kill()
    save(LocalStore(tmp_path), "best")
    assert names_in(tmp_path) == ["best"]


def test_an_abandoned_draft_does_not_lock_its_own_process_out(store: CheckpointStore) -> None:
    group = start(store, LocalComm(), "best")
    group.draft.put({"part": Blob([b"abc"], 3)})
    del group
    save(store, "best")
    assert store.complete("best")


def test_a_forked_copy_does_not_release_the_lock(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    draft = store.begin("best")
    pid = os.fork()
    if pid == 0:
        draft._lock = None  # as if the copy went out of scope
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    with pytest.raises(CheckpointBusyError):
        store.begin("best")
    draft.abort()


def test_a_writer_that_was_taken_for_dead_does_not_commit(store: CheckpointStore) -> None:
    group = start(store, LocalComm(), "best")
    prepared = prepare(TREE, group, LocalComm())
    if isinstance(store, LocalStore):
        for path in Path(store.address).glob(".hasten-lock.*"):
            path.unlink()
    else:
        assert isinstance(store, RemoteStore)
        store.fs.rm([path for path in store.fs.find(store.join_path()) if ".hasten-lock." in path])
    with pytest.raises(CheckpointBusyError, match=r"the lock of this save of .*best is gone.*Save again"):
        finish(prepared, group, LocalComm(), Manifest())
    assert store.names() == []


def test_many_that_come_at_once_never_write_together(store: CheckpointStore) -> None:
    inside, worst, won = 0, 0, 0
    guard = threading.Lock()

    def come() -> None:
        nonlocal inside, worst, won
        for _ in range(6):
            try:
                draft = store.begin("best")
            except CheckpointBusyError:
                continue
            with guard:
                inside += 1
                won += 1
                worst = max(worst, inside)
            time.sleep(0.002)
            with guard:
                inside -= 1
            draft.abort()

    threads = [threading.Thread(target=come) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert worst == 1
    assert won >= 1


# -- dead or alive -------------------------------------------------------------------------------------------------
def gone() -> Owner:
    """A process of this machine that has ended."""
    with subprocess.Popen(["true"]) as child:
        pass
    return msgspec.structs.replace(this_process(), pid=child.pid)


def elsewhere(**changes: Any) -> Owner:
    """A process of another machine that calls itself by the same name and has the same process id."""
    return msgspec.structs.replace(this_process(), boot="another boot", **changes)


def test_processes_are_told_apart_by_more_than_their_number() -> None:
    here = this_process()
    assert liveness(here, here) is Liveness.RUNNING
    assert liveness(gone(), here) is Liveness.DEAD
    reused = msgspec.structs.replace(here, started=here.started - 1)
    assert liveness(reused, here) is Liveness.DEAD, "another process has the number now"
    assert liveness(elsewhere(), here) is Liveness.UNKNOWN, "the same number on another machine says nothing"
    container = msgspec.structs.replace(here, namespace="pid:[1]")
    assert liveness(container, here) is Liveness.UNKNOWN, "nor in another container"
    assert decode_owner(encode_owner(here)) == here
    assert liveness(decode_owner(b"half a lo"), here) is Liveness.UNKNOWN


def test_a_zombie_is_dead() -> None:
    child = subprocess.Popen(["true"])
    owner = msgspec.structs.replace(this_process(), pid=child.pid, started=0)
    while liveness(owner, this_process()) is Liveness.RUNNING:
        time.sleep(0.01)
    assert child.poll() is not None


def test_a_lock_of_another_container_is_judged_by_its_flock(tmp_path: Path) -> None:
    owner = msgspec.structs.replace(this_process(), namespace="pid:[1]", locked=True)
    path = tmp_path / hidden("lock", "best", TOKEN)
    path.write_bytes(encode_owner(owner))
    with path.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(CheckpointBusyError):
            LocalStore(tmp_path).begin("best")
    save(LocalStore(tmp_path), "best")
    assert names_in(tmp_path) == ["best"]


@contextmanager
def beating(beat: Callable[[int], None]) -> Iterator[None]:
    """Signs of life, many a second, from a thread."""
    ended = threading.Event()

    def run() -> None:
        count = 0
        while not ended.wait(0.02):
            count += 1
            beat(count)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def test_a_lock_of_another_machine_is_judged_by_its_signs_of_life(store: CheckpointStore) -> None:
    name = hidden("lock", "best", TOKEN)
    save(store, "best")
    if isinstance(store, LocalStore):
        path = store.path("best") / name
        path.write_bytes(encode_owner(elsewhere(locked=True)))
        beats: Any = lambda count: os.utime(path)  # noqa: E731
    else:
        assert isinstance(store, RemoteStore)
        fs, place = store.fs, store.join_path(name)
        fs.pipe_file(place, encode_owner(elsewhere()))
        beats = lambda count: fs.pipe_file(place, encode_owner(elsewhere(beat=count)))  # noqa: E731
    with beating(beats), pytest.raises(CheckpointBusyError, match=f"process {os.getpid()} on {this_process().host}"):
        store.begin("best")
    save(store, "best")  # after a second without one
    assert store.complete("best")


def test_an_old_lock_of_another_machine_is_dead_at_first_sight(tmp_path: Path) -> None:
    path = tmp_path / hidden("lock", "best", TOKEN)
    path.write_bytes(encode_owner(elsewhere(since_s=0.0, beat_s=0.0)))
    os.utime(path, (time.time() - 3600, time.time() - 3600))
    store = LocalStore(tmp_path)  # with the usual patience: waiting would take a minute
    started = time.monotonic()
    save(store, "best")
    assert time.monotonic() - started < 30
    assert names_in(tmp_path) == ["best"]


def test_owners_show_signs_of_life(store: CheckpointStore) -> None:
    draft = store.begin("best")
    if isinstance(store, LocalStore):
        locks: Any = LocalLocks(Path(store.address), Disk())
    else:
        assert isinstance(store, RemoteStore)
        locks = store._locks()
    (first,) = locks.found("best")
    deadline = time.monotonic() + 20
    while locks.found("best")[0].signature == first.signature:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    draft.abort()
    assert locks.found("best") == []


def new_process_namespace() -> bool:
    """Whether children of this process get process ids of their own from now on."""
    return bool(ctypes.CDLL(None, use_errno=True).unshare(0x20000000) == 0)


def test_a_real_process_of_another_container(tmp_path: Path) -> None:
    """Its process id is 1 there; here, 1 is somebody else and alive whatever becomes of it."""
    ready, wait = os.pipe(), os.pipe()
    outer = os.fork()
    if outer == 0:
        if not new_process_namespace():
            os.write(ready[1], b"-")
            os._exit(0)
        inner = os.fork()
        if inner == 0:
            draft = LocalStore(tmp_path).begin("best")
            os.write(ready[1], b"+")
            os.read(wait[0], 1)
            draft.token  # noqa: B018 - keeps the draft alive until here
            os.kill(os.getpid(), signal.SIGKILL)
            os._exit(9)
        os.waitpid(inner, 0)
        os._exit(0)
    try:
        if os.read(ready[0], 1) != b"+":
            pytest.skip("process namespaces are not permitted here")
        with pytest.raises(CheckpointBusyError, match=r"process 1 on"):
            LocalStore(tmp_path).begin("best")
        # the first process of a namespace is not killed by its own signal, so that it goes by its exit code
    finally:
        os.write(wait[1], b"x")
        os.waitpid(outer, 0)
        for end in (*ready, *wait):
            os.close(end)
    assert any(parse_hidden(name) for name in names_in(tmp_path)), "it left its draft and its lock"
    save(LocalStore(tmp_path), "best")
    assert names_in(tmp_path) == ["best"]


# -- commits and retention -----------------------------------------------------------------------------------------
class Thief(Disk):
    """Removes a file at the moment of a rename, as a clean-up job might."""

    def __init__(self, victim: str) -> None:
        self._victim = victim

    def rename(self, old: Path, new: Path) -> None:
        super().rename(old, new)
        for root in (new, old.parent, new.parent):
            for path in root.rglob(self._victim) if root.is_dir() else ():
                path.unlink()


@pytest.mark.parametrize("again", [False, True])
def test_a_commit_that_lost_a_file_is_withdrawn(tmp_path: Path, again: bool) -> None:
    if again:
        group = start(LocalStore(tmp_path), LocalComm(), "best")
        tree = StateTree({"old": Component({}, {"a": 1})})
        finish(prepare(tree, group, LocalComm()), group, LocalComm(), Manifest())
    with pytest.raises(CheckpointError, match=r"x\.safetensors disappeared while the checkpoint was being committed"):
        save(LocalStore(tmp_path, Thief("x.safetensors")), "best")
    assert names_in(tmp_path) == (["best"] if again else [])
    if again:
        assert names_in(tmp_path / "best") == ["manifest.json", "old.safetensors"]
        assert LocalStore(tmp_path).complete("best")


def test_a_commit_at_a_url_that_lost_a_file_is_withdrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    fsspec = pytest.importorskip("fsspec")
    store = RemoteStore("memory://owners/run")
    save(store, "best")
    put = store.fs.pipe_file

    def pipe_file(path: str, value: bytes, **options: Any) -> None:
        put(path, value, **options)
        if path.endswith("manifest.json"):
            for found in store.fs.find(store.join_path("best")):
                if "/v-" in found and found.endswith("x.safetensors"):
                    store.fs.rm(found)

    with monkeypatch.context() as patch:
        patch.setattr(store.fs, "pipe_file", pipe_file)
        with pytest.raises(CheckpointError, match=r"x\.safetensors is at .* with none of"):
            save(store, "best")
    assert store.complete("best"), "the one before"
    fsspec.filesystem("memory").rm("/owners", recursive=True)


def test_retention_spares_what_another_process_writes(store: CheckpointStore) -> None:
    for number in range(4):
        save(store, numbered(number))
    draft = store.begin(numbered(1))
    assert retire_expired(store, Retention(total_limit=1), number_of) == [numbered(0), numbered(2)]
    draft.abort()
    assert store.complete(numbered(1))
    assert retire_expired(store, Retention(total_limit=1), number_of) == [numbered(1)]
    assert store.names() == [numbered(3)]


def test_trash_of_a_live_process_is_left_to_it(tmp_path: Path) -> None:
    trash = tmp_path / hidden("trash", numbered(0), TOKEN)
    trash.mkdir()
    (trash / "file").write_text("x")
    with subprocess.Popen(["sleep", "60"]) as child:
        owner = msgspec.structs.replace(this_process(), pid=child.pid, started=0)
        (tmp_path / hidden("lock", numbered(0), TOKEN)).write_bytes(encode_owner(owner))
        save(LocalStore(tmp_path), numbered(1))
        assert (trash / "file").exists()
        child.kill()
    save(LocalStore(tmp_path), numbered(2))
    assert names_in(tmp_path) == [numbered(1), numbered(2)]


def test_names_too_long_for_hidden_entries_are_shortened(tmp_path: Path) -> None:
    name = "ü" * 120
    assert len(hidden("draft", name, TOKEN).encode()) < 255
    assert tag_of(name) != tag_of(name + "x")
    save(LocalStore(tmp_path), name)
    save(LocalStore(tmp_path), name)
    assert names_in(tmp_path) == [name]
    with pytest.raises(CheckpointBusyError):
        _two(LocalLocks(tmp_path, Disk()), name)


def _two(locks: LocalLocks, name: str) -> None:
    first = acquire(locks, name, name)
    try:
        acquire(locks, name, name)
    finally:
        first.release()
