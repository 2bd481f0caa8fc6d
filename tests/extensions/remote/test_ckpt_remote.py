"""Checkpoints at URLs: the manifest comes last, and what has none is no checkpoint."""

from __future__ import annotations

import runpy
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hasten.checkpoint.base import Blob, Component, StateTree
from hasten.checkpoint.format.manifest import Manifest, numbered_checkpoint
from hasten.checkpoint.reader import open_checkpoint
from hasten.checkpoint.save import Save
from hasten.checkpoint.store.local_store import LocalStore, locate, open_store
from hasten.comm.agreement import agreeing
from hasten.comm.local import LocalComm
from hasten.errors import ConfigError, CorruptCheckpointError, IncompleteCheckpointError
from hasten.extensions.remote.remote_store import RemoteStore
from hasten.optional import available
from hasten.state.load_source import find_newest, is_complete

fsspec = pytest.importorskip("fsspec")
SCRIPT = Path(__file__).parent / "remote_run.py"


@pytest.fixture
def url() -> Iterator[str]:
    """An empty place in memory."""
    files = fsspec.filesystem("memory")
    yield "memory://bucket/run"
    if files.exists("/bucket"):
        files.rm("/bucket", recursive=True)


def save(store: RemoteStore, name: str, number: float, broken: bool = False) -> None:
    comm = LocalComm()
    tensors = {f"w{i}": torch.full((1000,), number) for i in range(3)}
    tree = StateTree(
        {
            "model": Component(tensors, None, "model"),
            "mine": Component({}, {"n": number}, per_rank=True),
        }
    )
    with agreeing(comm, "saving") as together, Save(store, comm) as save:
        save.start(together, name)
        save.plan(tree, together)
        if broken:
            save.draft.put(save.blobs)
            return
        save.write(Manifest(number=int(number)), together)


def value(store: RemoteStore, name: str) -> float:
    with open_checkpoint(store, name, LocalComm()) as checkpoint:
        model = checkpoint.component("model")
        return {
            float(v)
            for pieces in model.pieces.values()
            for v in pieces[0].data.tolist()
        }.pop()


def test_what_has_no_manifest_is_never_chosen(url: str) -> None:
    store = RemoteStore(url)
    save(store, "checkpoint_0", 0.0)
    save(store, "checkpoint_1", 1.0, broken=True)
    assert find_newest(store) == "checkpoint_0"
    with pytest.raises(
        IncompleteCheckpointError, match=r"checkpoint_1/manifest.json does not exist"
    ):
        store.manifest("checkpoint_1")
    save(store, "checkpoint_2", 2.0)
    assert store.names() == ["checkpoint_0", "checkpoint_2"]
    assert value(store, find_newest(store) or "") == 2.0
    store.delete("checkpoint_0")
    assert store.names() == ["checkpoint_2"]


def test_overwriting_switches_at_the_manifest(url: str) -> None:
    store = RemoteStore(url)
    save(store, "best", 1.0)
    save(store, "best", 2.0, broken=True)
    assert value(store, "best") == 1.0, "the second save died before its manifest"
    save(store, "best", 3.0)
    assert value(store, "best") == 3.0
    save(store, "best", 4.0)
    assert value(store, "best") == 4.0
    listed = {*store.listed_files("best"), "manifest.json"}
    stored = set(store.sizes("best"))
    assert listed <= stored
    assert len(stored - listed) == 2, (
        "only files of the save that died, which are removed a day later"
    )


def test_damage_is_found(url: str) -> None:
    store = RemoteStore(url)
    save(store, "checkpoint_0", 0.0)
    (path,) = [
        path
        for path in store.fs.find("/bucket/run/checkpoint_0")
        if path.endswith("/model.safetensors")
    ]
    raw = bytearray(store.fs.cat_file(path))
    raw[-3] ^= 1
    store.fs.pipe_file(path, bytes(raw))
    with pytest.raises(
        CorruptCheckpointError, match=r"model\.safetensors has a wrong checksum"
    ):
        value(store, "checkpoint_0")
    store.fs.rm(path)
    assert not is_complete(store, "checkpoint_0")
    with pytest.raises(
        IncompleteCheckpointError, match=r"model\.safetensors is missing"
    ):
        value(store, "checkpoint_0")


def test_a_run_in_memory(url: str) -> None:
    runpy.run_path(str(SCRIPT))["resumes"](url)


def test_a_run_at_a_file_url_is_an_atomic_folder(tmp_path: Path) -> None:
    runpy.run_path(str(SCRIPT))["resumes"](f"file://{tmp_path}/run")
    assert isinstance(open_store(f"file://{tmp_path}/run"), LocalStore)
    assert (tmp_path / "run/checkpoints/checkpoint_1/model.safetensors").is_file()


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.skipif(
    not (available("moto") and available("s3fs")),
    reason="needs moto[s3], flask, flask-cors and s3fs",
)
def test_a_run_on_an_s3_server() -> None:
    """In a process of its own, because clients and server keep threads and sockets."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(SCRIPT)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.endswith("resumed\n")


def test_urls_that_name_nothing_are_refused() -> None:
    with pytest.raises(ConfigError, match="give a URL such as"):
        locate("s3://bucket")
    with pytest.raises(ConfigError, match="root of the file system"):
        locate("/")


def test_abandoned_versions_at_a_url_are_removed_after_a_day(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = RemoteStore(url)
    for draft in (store.begin("best"), store.begin_numbered(0)):
        draft.put({"part": Blob([b"abc"], 3)})
    save(store, "best", 1.0)
    versions = {name.partition("/")[0] for name in store.sizes("best")}
    # the manifest, the abandoned version and the committed one
    assert len(versions) == 3
    current_time = time.time()
    monkeypatch.setattr(time, "time", lambda: current_time + 25 * 3600)
    save(store, "best", 1.0)
    assert len({name.partition("/")[0] for name in store.sizes("best")}) == 2
    store.begin_numbered(0)
    assert set(store.sizes(numbered_checkpoint(0))) == set()
