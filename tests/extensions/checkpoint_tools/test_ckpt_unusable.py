"""Checkpoints that cannot be used: a run never starts anew over them, and readers of a folder in use find one version."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hasten import Accelerator, ProjectConfiguration
from hasten.checkpoint.base import Component, Slice, StateTree
from hasten.checkpoint.export import read_model, save_model
from hasten.checkpoint.format.manifest import (
    MANIFEST_NAME,
    Manifest,
    decode_manifest,
    encode_manifest,
)
from hasten.checkpoint.reader import open_checkpoint, read_one_version
from hasten.checkpoint.save import save_tree
from hasten.checkpoint.store.disk import Disk, cannot_write
from hasten.checkpoint.store.local_store import LocalStore
from hasten.cli.main import main
from hasten.comm.local import LocalComm
from hasten.data.loader import decode_position
from hasten.errors import (
    CheckpointError,
    CheckpointReplacedError,
    CheckpointVersionError,
    ConfigError,
    IncompleteCheckpointError,
    UnsafeCheckpointError,
)
from hasten.extensions.checkpoint_tools.inspect import (
    find_checkpoint,
    verify_checkpoint,
)


def run(folder: Path | None = None, **settings: Any) -> tuple[Accelerator, nn.Module]:
    accelerator = Accelerator(
        cpu=True,
        project_config=ProjectConfiguration(
            project_dir=None if folder is None else str(folder), **settings
        ),
    )
    model = accelerator.prepare(nn.Linear(2, 2))
    return accelerator, model


# -- only an empty place is "none" -----------------------------------------------------------------------------------
def flip_a_bit(folder: Path) -> None:
    """Change the number of processes, so that the manifest is still JSON."""
    raw = (folder / MANIFEST_NAME).read_bytes()
    assert b'"world_size": 1,' in raw
    (folder / MANIFEST_NAME).write_bytes(
        raw.replace(b'"world_size": 1,', b'"world_size": 3,')
    )


def use_a_later_version(folder: Path) -> None:
    manifest = decode_manifest((folder / MANIFEST_NAME).read_bytes(), "")
    later = Manifest(
        **{
            **{key: getattr(manifest, key) for key in manifest.__struct_fields__},
            "version": 99,
        }
    )
    (folder / MANIFEST_NAME).write_bytes(encode_manifest(later))


FAULTS: dict[str, tuple[Callable[[Path], object], type[CheckpointError], str]] = {
    "bit": (flip_a_bit, IncompleteCheckpointError, "checksum does not match"),
    "missing file": (
        lambda folder: (folder / "model.safetensors").unlink(),
        IncompleteCheckpointError,
        "model.safeten",
    ),
    "truncated": (
        lambda folder: os.truncate(folder / "model.safetensors", 9),
        IncompleteCheckpointError,
        "another size",
    ),
    "no manifest": (
        lambda folder: (folder / MANIFEST_NAME).unlink(),
        IncompleteCheckpointError,
        "manifest.json does",
    ),
    "version": (
        use_a_later_version,
        CheckpointVersionError,
        "written in checkpoint format 99 by a newer version",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_an_unusable_checkpoint_is_not_taken_for_none(
    fault: str, tmp_path: Path
) -> None:
    accelerator, _ = run(tmp_path)
    assert accelerator.load_state(must_exist=False) == []
    checkpoint = Path(accelerator.save_state())
    damage, kind, text = FAULTS[fault]
    damage(checkpoint)
    names = sorted(checkpoint.iterdir())
    resumed, _ = run(tmp_path, total_limit=1)
    for must_exist in (False, True):
        with pytest.raises(kind, match=text):
            resumed.load_state(must_exist=must_exist)
    resumed.save_state()
    assert sorted(checkpoint.iterdir()) == names, (
        "retention leaves what the run neither wrote nor loaded"
    )


@pytest.mark.parametrize("must_exist", [False, True])
def test_a_file_with_the_name_of_a_checkpoint_is_not_taken_for_none(
    must_exist: bool, tmp_path: Path
) -> None:
    accelerator, _ = run(tmp_path)
    checkpoint = Path(accelerator.save_state())
    shutil.rmtree(checkpoint)
    checkpoint.write_text("not a checkpoint")
    with pytest.raises(
        IncompleteCheckpointError,
        match=r"checkpoint_0 is a file, .* Move or delete the file",
    ):
        accelerator.load_state(must_exist=must_exist)
    assert Path(accelerator.save_state()).name == "checkpoint_1"
    accelerator.load_state()


@pytest.mark.parametrize("kind", ["file", "link to a disk that is not mounted"])
def test_only_a_root_that_does_not_exist_is_empty(kind: str, tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    if kind == "file":
        root.write_text("not a folder")
    else:
        root.symlink_to(tmp_path / "disk")
    accelerator, _ = run(tmp_path)
    with pytest.raises(
        CheckpointError, match=r"checkpoints cannot be read: .* mounted"
    ):
        accelerator.load_state(must_exist=False)


def test_a_folder_that_cannot_be_read_is_not_taken_for_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    accelerator, _ = run(tmp_path)
    accelerator.save_state()

    def failing(path: Path) -> Iterator[Path]:
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    monkeypatch.setattr(Path, "iterdir", failing)
    with pytest.raises(
        CheckpointError, match=r"cannot be read: .*Input/output error.* disk is mounted"
    ):
        accelerator.load_state(must_exist=False)


def test_an_older_complete_checkpoint_is_loaded_with_a_warning_that_names_the_fault(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    accelerator, _ = run(tmp_path)
    accelerator.save_state()
    flip_a_bit(Path(accelerator.save_state()))
    accelerator.load_state(must_exist=False)
    assert "using checkpoint_0" in caplog.text
    assert (
        "checkpoint_1/manifest.json: the manifest's checksum does not match"
        in caplog.text
    )


# -- readers of a folder that is being replaced ----------------------------------------------------------------------
def tree(value: float) -> StateTree:
    return StateTree(
        {
            f"model_{i}": Component({"w": torch.full((300,), value)}, None, "model")
            for i in range(4)
        }
    )


def _replace_again_and_again(root: Path, until: float) -> None:
    value = 1.0
    while time.monotonic() < until:
        save_tree(
            LocalStore(root, threads=1),
            "best",
            tree(value),
            Manifest(number=int(value)),
            LocalComm(),
        )
        value += 1


def test_readers_of_a_folder_that_is_being_replaced_find_one_version(
    tmp_path: Path,
) -> None:
    save_tree(LocalStore(tmp_path), "best", tree(0.0), Manifest(number=0), LocalComm())
    until = time.monotonic() + 3
    writer = multiprocessing.get_context("fork").Process(
        target=_replace_again_and_again, args=(tmp_path, until)
    )
    writer.start()

    def values() -> set[float]:
        with open_checkpoint(LocalStore(tmp_path), "best", LocalComm()) as checkpoint:
            numbers = {float(checkpoint.manifest.number or 0)}
            for i in range(4):
                numbers |= set(
                    checkpoint.component(f"model_{i}").pieces["w"][0].data.tolist()
                )
            return numbers

    seen_numbers = set()
    while time.monotonic() < until:
        version_numbers = read_one_version(values)
        assert len(version_numbers) == 1
        seen_numbers |= version_numbers
        assert verify_checkpoint(*find_checkpoint(str(tmp_path / "best"))) == []
    writer.join()
    assert len(seen_numbers) > 3, "it was replaced meanwhile"


def test_a_checkpoint_that_is_replaced_at_every_try_is_an_error(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    save_tree(store, "best", tree(0.0), Manifest(number=0), LocalComm())

    def never() -> None:
        with open_checkpoint(store, "best", LocalComm(), verify=False) as checkpoint:
            save_tree(
                store,
                "best",
                tree(1.0),
                Manifest(number=1, created_s=time.time()),
                LocalComm(),
            )
            checkpoint.check_current()

    with pytest.raises(CheckpointReplacedError, match="each of the 20 times"):
        read_one_version(never)


# -- a save owns its folder ------------------------------------------------------------------------------------------
def sharded(value: float) -> StateTree:
    return StateTree(
        {
            "model": Component(
                {"w": Slice(torch.full((4,), value), (4,), (0,))}, None, "model"
            )
        }
    )


def test_a_model_and_shards_do_not_lie_in_one_folder(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    save_tree(store, "other", sharded(2.0), Manifest(), LocalComm())
    with pytest.raises(CheckpointError, match="holds a checkpoint"):
        save_model({"w": torch.ones(4)}, tmp_path / "other")
    save_model({"w": torch.ones(4)}, tmp_path / "out")
    with pytest.raises(
        CheckpointError, match=r"holds an exported model \(model\.safetensors\)"
    ):
        save_tree(store, "out", sharded(3.0), Manifest(), LocalComm())
    assert torch.equal(read_model(tmp_path / "out")["w"], torch.ones(4))


def test_a_whole_checkpoint_gives_way_to_a_sharded_one(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    full_tree = StateTree({"model": Component({"w": torch.ones(4)}, None, "model")})
    for damaged in (False, True):
        save_tree(store, "out", full_tree, Manifest(), LocalComm())
        if damaged:
            flip_a_bit(tmp_path / "out")
        save_tree(store, "out", sharded(3.0), Manifest(), LocalComm())
        assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
            MANIFEST_NAME,
            "model_shard_00000.safetensors",
        ]


# -- interrupted exports ---------------------------------------------------------------------------------------------
class Killed(Disk):
    """Kills the process at one of its changes of the disk."""

    calls = 0
    killed_call = -1

    def _turn(self) -> None:
        type(self).calls += 1
        if self.calls - 1 == self.killed_call:
            os.kill(os.getpid(), signal.SIGKILL)

    def rename(self, old: Path, new: Path) -> None:
        self._turn()
        super().rename(old, new)

    def remove_file(self, path: Path) -> None:
        self._turn()
        super().remove_file(path)


@pytest.mark.parametrize("size", ["10GB", "20B"])
def test_a_killed_export_leaves_no_mixture_and_the_next_one_no_leftovers(
    size: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = (
        {"a": torch.zeros(4), "b": torch.zeros(4)},
        {"a": torch.ones(4), "b": torch.ones(4)},
    )
    target = tmp_path / "target"
    monkeypatch.setattr("hasten.checkpoint.export.Disk", Killed)
    for change_index in range(30):
        save_model(old, target, size)
        pid = os.fork()
        if pid == 0:
            Killed.calls, Killed.killed_call = 0, change_index
            save_model(new, target, size)
            os._exit(0)
        if os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0:
            break
        try:
            values = {float(tensor[0]) for tensor in read_model(target).values()}
        except IncompleteCheckpointError:
            assert size == "20B", "one file is replaced at once"
            values = {1.0}
        assert len(values) == 1
        save_model(new, target, size)
        assert {float(tensor[0]) for tensor in read_model(target).values()} == {1.0}
        assert not list(target.glob(".hasten*"))
    else:
        pytest.fail("it was always killed")


# -- metrics ---------------------------------------------------------------------------------------------------------
def test_a_save_without_the_best_metric_is_an_error(tmp_path: Path) -> None:
    accelerator, _ = run(tmp_path, total_limit=1, keep_best=1, best_metric="loss")
    with pytest.raises(ConfigError, match=r"lacks best_metric='loss'.*\['los'\]"):
        accelerator.save_state(metrics={"los": 1.0})
    accelerator.save_state(metrics={"loss": 1.0})
    accelerator.save_state(metrics={"loss": float("nan")})
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["checkpoint_0", "checkpoint_1"], (
        "the best, and the newest although it is nan"
    )
    accelerator.save_state()
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["checkpoint_0", "checkpoint_2"]


# -- disks and places ------------------------------------------------------------------------------------------------
def test_errors_of_a_disk_name_what_it_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    absent = tmp_path / "not" / "made"
    full = str(
        cannot_write(
            "x", absent, 5_000_000, OSError(errno.ENOSPC, "No space left on device")
        )
    )
    assert "is full" in full
    assert "mounted at /" in full
    assert "this rank writes 5.0 MB" in full
    usage = os.statvfs(tmp_path)

    class NoInodes:
        f_bavail, f_frsize, f_blocks = usage.f_bavail, usage.f_frsize, usage.f_blocks
        f_files, f_favail = 1000, 0

    monkeypatch.setattr(os, "statvfs", lambda path: NoInodes)
    assert "0 of its 1000 inodes are free" in str(
        cannot_write("x", tmp_path, 0, OSError(errno.ENOSPC, "No space"))
    )
    assert "in your quota" in str(
        cannot_write("x", tmp_path, 0, OSError(errno.EDQUOT, "Quota exceeded"))
    )
    limit = str(cannot_write("x", tmp_path, 0, OSError(errno.EFBIG, "File too large")))
    assert "ulimit -f unlimited" in limit
    assert "total_limit" not in limit


def test_a_disk_that_is_full_at_the_start_is_named(tmp_path: Path) -> None:
    class Full(Disk):
        def make_folder(self, path: Path) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    with pytest.raises(
        CheckpointError, match=r"the disk of .* \(mounted at .* is full"
    ):
        LocalStore(tmp_path / "run", Full()).begin("best")


def test_the_list_of_a_checkpoint_is_the_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    accelerator, _ = run()
    accelerator.save_state(tmp_path / "best")
    assert main(["ckpt", "list", str(tmp_path / "best"), "--json"]) == 0
    assert [row["name"] for row in json.loads(capsys.readouterr().out)] == ["best"]


def test_a_loop_of_links_is_a_typed_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    accelerator, _ = run()
    for use in (accelerator.load_state, accelerator.save_state):
        with pytest.raises(CheckpointError, match="loop"):
            use(tmp_path / "loop")
    for command in ("list", "verify", "show"):
        assert main(["ckpt", command, str(tmp_path / "loop")]) == 1
        assert "loop" in "".join(capsys.readouterr())


def test_a_model_is_not_read_through_a_link_out_of_its_folder(tmp_path: Path) -> None:
    save_model({"w": torch.ones(2)}, tmp_path / "elsewhere")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.safetensors").symlink_to(
        tmp_path / "elsewhere" / "model.safetensors"
    )
    with pytest.raises(UnsafeCheckpointError, match="leads out of"):
        read_model(tmp_path / "model")


@pytest.mark.parametrize("state", [3, {}, {"version": 99}])
def test_a_forged_state_of_a_loader_is_an_error_of_the_checkpoint(
    state: object,
) -> None:
    with pytest.raises(CheckpointError, match="loader's state"):
        decode_position(state, "samples", 4)  # type: ignore[arg-type]
