"""Where a checkpoint is saved to: the working folder, mount points, full disks, and what hooks put there."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hasten import Accelerator
from hasten.checkpoint.base import Component, StateTree
from hasten.checkpoint.format.manifest import Manifest
from hasten.checkpoint.reader import open_checkpoint
from hasten.checkpoint.save import Save
from hasten.checkpoint.store.disk import Disk
from hasten.checkpoint.store.local_store import LocalStore, locate
from hasten.comm.agreement import agreeing
from hasten.comm.local import LocalComm
from hasten.errors import CheckpointError, UnsafeCheckpointError
from hasten.extension import offers

Hook = Callable[[Path], None]


def run(
    values: float = 1.0, size: int = 4, hook: Hook | None = None
) -> tuple[Accelerator, Any]:
    """A run whose weights all have one value."""
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(size, size)
    optimizer = torch.optim.AdamW(model.parameters())
    model, _ = accelerator.prepare(model, optimizer)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(values)
    if hook is not None:
        accelerator.register_save_state_pre_hook(
            lambda models, weights, folder: hook(Path(folder))
        )
    return accelerator, model


def load_value(target: Path | str) -> float:
    """The value in a checkpoint, after a whole load."""
    accelerator, model = run(-1.0)
    accelerator.load_state(target)
    (value,) = {float(v) for p in model.parameters() for v in p.flatten().tolist()}
    return value


def names_in(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))


def listed_files(target: Path | str) -> set[str]:
    store, name = locate(target)
    return {file.name for file in store.manifest(name).files}


@contextmanager
def mounted_disk(folder: Path, size: str) -> Iterator[Path]:
    """A small disk of its own, mounted on a folder."""
    folder.mkdir()
    if (
        os.geteuid() != 0
        or subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={size}", "hasten-test", folder],
            check=False,
        ).returncode
    ):
        pytest.skip("mounting is not permitted here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


# -- folders that stay where they are --------------------------------------------------------------------------------
@pytest.mark.parametrize("below", ["", "logs"])
def test_the_working_folder_is_saved_into_and_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, below: str
) -> None:
    out = tmp_path / "out"
    (out / below).mkdir(parents=True)
    (out / "config.json").write_text("{}")
    initial_inode = out.stat().st_ino
    monkeypatch.chdir(out / below)
    for value in (1.0, 2.0):
        accelerator, _ = run(value)
        accelerator.save_state("." if not below else "..")
        assert Path.cwd() == out / below
        assert load_value(out) == value
    assert out.stat().st_ino == initial_inode
    assert (out / "config.json").read_text() == "{}"
    assert not [name for name in names_in(tmp_path) if ".hasten" in name]


def test_a_mount_point_is_saved_into(tmp_path: Path) -> None:
    with mounted_disk(tmp_path / "disk", "4m") as disk:
        for value in (1.0, 2.0):
            accelerator, _ = run(value)
            accelerator.save_state(disk)
            assert load_value(disk) == value
            assert [path.name for path in tmp_path.iterdir()] == ["disk"], (
                "nothing on the disk of the parent"
            )
        assert set(names_in(disk)) == listed_files(disk) | {"manifest.json"}
    assert names_in(tmp_path / "disk") == []


def test_a_full_disk_is_named_and_keeps_what_it_has(tmp_path: Path) -> None:
    with mounted_disk(tmp_path / "small", "1m") as disk:
        accelerator, _ = run(1.0)
        accelerator.save_state(disk / "out")
        accelerator, _ = run(2.0, size=600)
        for target in (disk / "out", disk / "other"):
            expected = rf"(?s)the disk of {disk}.*\(mounted at {disk}\) is full: No space left.* MB of 1\.0 MB are free"
            with pytest.raises(CheckpointError, match=expected):
                accelerator.save_state(target)
        assert load_value(disk / "out") == 1.0
        assert [path.name for path in disk.iterdir()] == ["out"]
        assert not [name for name in names_in(disk) if ".hasten" in name]


def test_a_disk_without_inodes_is_not_called_full(tmp_path: Path) -> None:
    with mounted_disk(tmp_path / "disk", "4m,nr_inodes=6") as disk:
        accelerator, _ = run(1.0)
        for target in (disk / "out", disk / "other"):
            with pytest.raises(
                CheckpointError, match=r"no room for more files: \d of its 6 inodes"
            ):
                accelerator.save_state(target)


def as_nobody(work: Callable[[], None]) -> str:
    """What went wrong when a process without privileges does the work; empty when nothing did."""
    pipe_ends = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            if os.geteuid() == 0:
                os.setgroups([])
                os.setgid(65534)
                os.setuid(65534)
            work()
        except BaseException as error:
            os.write(pipe_ends[1], f"{type(error).__name__}: {error}".encode()[:4000])
        os._exit(0)
    os.close(pipe_ends[1])
    with os.fdopen(pipe_ends[0], "rb") as error_stream:
        text = error_stream.read().decode()
    os.waitpid(pid, 0)
    return text


def save(
    root: Path,
    name: str,
    value: float,
    disk: Disk | None = None,
    hook: Hook | None = None,
) -> None:
    """One save with the means below the Accelerator."""
    comm = LocalComm()
    tensors = {f"w{i}": torch.full((50,), value) for i in range(3)}
    tree = StateTree(
        {
            f"model_{key}": Component({key: tensor}, None, "model")
            for key, tensor in tensors.items()
        }
    )
    with (
        agreeing(comm, "saving") as together,
        Save(LocalStore(root, disk, threads=1), comm) as save,
    ):
        save.start(together, name)
        if hook is not None and save.draft.folder is not None:
            hook(save.draft.folder)
        save.plan(tree, together)
        save.write(Manifest(number=int(value)), together)


def value_of(root: Path, name: str) -> float:
    """The value in a checkpoint of `save`, after verifying and reading all of it."""
    with ExitStack() as stack:
        checkpoint = stack.enter_context(
            open_checkpoint(LocalStore(root), name, LocalComm())
        )
        saved_values = {float(checkpoint.manifest.number or 0)}
        for i in range(3):
            saved_values |= set(
                checkpoint.component(f"model_w{i}").pieces[f"w{i}"][0].data.tolist()
            )
        for file in checkpoint.manifest.files:
            if file.name.endswith(".txt"):
                saved_values.add(float((checkpoint.folder / file.name).read_text()))
    assert len(saved_values) == 1, saved_values
    return saved_values.pop()


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that every user can reach, which pytest's are not."""
    folder = Path(tempfile.mkdtemp(prefix="hasten-open-"))
    folder.chmod(0o755)
    yield folder
    folder.chmod(0o755)
    shutil.rmtree(folder)


def test_a_writable_folder_in_one_that_is_not(open_folder: Path) -> None:
    out = open_folder / "out"
    out.mkdir()
    out.chmod(0o777)
    open_folder.chmod(0o755 if os.geteuid() == 0 else 0o555)
    for value in (1.0, 2.0):
        assert as_nobody(lambda value=value: save(open_folder, "out", value)) == ""  # type: ignore[misc]
        assert value_of(open_folder, "out") == value
        assert names_in(open_folder) == [
            "out",
            *(f"out/{name}" for name in names_in(out)),
        ]
    error_message = as_nobody(lambda: save(open_folder, "other", 1.0))
    assert error_message.startswith(
        "CheckpointError: cannot start the checkpoint 'other'"
    )
    assert "Permission denied" in error_message


def test_a_folder_that_appears_while_a_save_is_under_way_keeps_what_is_in_it(
    tmp_path: Path,
) -> None:
    def write_meanwhile(folder: Path) -> None:
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "tokenizer.json").write_text("mine")

    for blocking in (True, False):
        accelerator, _ = run(1.0, hook=write_meanwhile)
        accelerator.save_state(tmp_path / "out", blocking=blocking)
        accelerator.wait_for_saves()
        assert (tmp_path / "out" / "tokenizer.json").read_text() == "mine"
        assert load_value(tmp_path / "out") == 1.0
        assert not [name for name in names_in(tmp_path) if ".hasten" in name]
        shutil.rmtree(tmp_path / "out")


def test_no_save_needs_room_for_temporary_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    accelerator, _ = run(1.0)
    (tmp_path / "file").write_text("no folder can be made in a file")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "file"))
    for safe in (True, False):
        accelerator.save_state(tmp_path / "out", safe_serialization=safe)
        assert load_value(tmp_path / "out") == 1.0


# -- replaced in place -----------------------------------------------------------------------------------------------
class WatchedDisk(Disk):
    """Looks at the checkpoint before and after every change, as a reader at that moment would."""

    def __init__(self, look: Callable[[], None]) -> None:
        self._look = look

    def rename(self, old: Path, new: Path) -> None:
        self._look()
        super().rename(old, new)
        self._look()

    def remove_file(self, path: Path) -> None:
        super().remove_file(path)
        self._look()

    def link(self, old: Path, new: Path) -> None:
        super().link(old, new)
        self._look()

    def remove_tree(self, path: Path) -> None:
        for entry in [entry for entry in path.rglob("*") if entry.is_file()]:
            entry.unlink()
            self._look()
        super().remove_tree(path)


def hook_writing(name: str, value: float) -> Hook:
    def write(folder: Path) -> None:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(str(value))

    return write


def test_a_reader_finds_the_old_or_the_new_checkpoint_at_every_moment(
    tmp_path: Path,
) -> None:
    save(tmp_path, "out", 1.0, hook=hook_writing("old/a.txt", 1.0))
    observed_values: list[float] = []
    disk = WatchedDisk(lambda: observed_values.append(value_of(tmp_path, "out")))
    save(tmp_path, "out", 2.0, disk, hook=hook_writing("new/b.txt", 2.0))
    assert observed_values == sorted(observed_values), (
        "first the old one, then the new one, and never back"
    )
    assert set(observed_values) == {1.0, 2.0}
    assert len(observed_values) > 20
    assert "new/b.txt" in names_in(tmp_path / "out")
    assert not [
        name
        for name in names_in(tmp_path / "out")
        if name.startswith(("old", ".hasten"))
    ]


class DiskWithoutLinks(Disk):
    """A file system without hard links, as some network ones are."""

    def link(self, old: Path, new: Path) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))


def test_without_hard_links_the_files_stay_where_they_were_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path, "out", 1.0, hook=hook_writing("old/a.txt", 1.0))
    (tmp_path / "out" / "config.json").write_text("{}")
    for value in (2.0, 3.0):
        save(
            tmp_path,
            "out",
            value,
            DiskWithoutLinks(),
            hook=hook_writing("new/b.txt", value),
        )
        assert value_of(tmp_path, "out") == value
        visible = {
            name
            for name in names_in(tmp_path / "out")
            if not name.startswith(".hasten")
        }
        assert visible == {"manifest.json", "config.json"}, (
            "no file of an older checkpoint under a familiar name"
        )
    assert "stay in its folder .hasten-draft." in caplog.text
    (tmp_path / "out").rename(tmp_path / "moved")
    assert value_of(tmp_path, "moved") == 3.0
    save(tmp_path, "moved", 4.0)
    assert set(names_in(tmp_path / "moved")) == listed_files(tmp_path / "moved") | {
        "manifest.json",
        "config.json",
    }
    assert value_of(tmp_path, "moved") == 4.0


@pytest.mark.parametrize(
    ("users", "hooks"), [("mine", "mine/a.txt"), ("mine/a.txt", "mine")]
)
def test_a_users_file_in_the_way_is_an_error_that_changes_nothing(
    tmp_path: Path, users: str, hooks: str
) -> None:
    save(tmp_path, "out", 1.0)
    (tmp_path / "out" / users).parent.mkdir(exist_ok=True)
    (tmp_path / "out" / users).write_text("keep")
    initial_names = names_in(tmp_path)
    with pytest.raises(
        CheckpointError, match=r"conflicts with .*Move it, or save into another folder"
    ):
        save(tmp_path, "out", 2.0, hook=hook_writing(hooks, 2.0))
    assert names_in(tmp_path) == initial_names
    assert value_of(tmp_path, "out") == 1.0


def test_a_file_where_a_folder_was_and_the_other_way_round(tmp_path: Path) -> None:
    for value, name in ((1.0, "a.txt"), (2.0, "a.txt/b.txt"), (3.0, "a.txt")):
        save(tmp_path, "out", value, hook=hook_writing(name, value))
        assert value_of(tmp_path, "out") == value
        assert name in listed_files(tmp_path / "out")


# -- hooks -----------------------------------------------------------------------------------------------------------
@pytest.fixture(params=["local", "memory"])
def target(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """Where a checkpoint with hooks goes."""
    if request.param == "local":
        yield str(tmp_path / "run" / "checkpoint-10")
        return
    if "url" not in offers("stores"):
        pytest.skip("no extension provides storage at URLs")
    fsspec = pytest.importorskip("fsspec")
    yield "memory://hooks/run/checkpoint-10"
    fsspec.filesystem("memory").rm("/hooks", recursive=True)


def test_hooks_see_the_final_name_and_what_they_leave_is_saved(target: str) -> None:
    hook_folders: list[Path] = []

    def first(folder: Path) -> None:
        hook_folders.append(folder)
        assert int(folder.name.split("-")[1]) == 10
        (folder / "removed.txt").write_text("x")
        (folder / "replaced.txt").write_text("before")
        (folder / "deep" / "er").mkdir(parents=True)
        (folder / "deep" / "er" / "file.txt").write_text("kept")

    def second(folder: Path) -> None:
        (folder / "removed.txt").unlink()
        (folder / "replaced.txt").write_text("after")

    def check(models: list[nn.Module], folder: str) -> None:
        assert (Path(folder) / "replaced.txt").read_text() == "after"
        assert (Path(folder) / "deep" / "er" / "file.txt").read_text() == "kept"
        assert not (Path(folder) / "removed.txt").exists()

    accelerator, _ = run(1.0, hook=first)
    accelerator.register_save_state_pre_hook(
        lambda models, weights, folder: second(Path(folder))
    )
    accelerator.register_load_state_pre_hook(check)
    for blocking in (True, False):  # the second replaces the first
        accelerator.save_state(target, blocking=blocking)
        accelerator.wait_for_saves()
        names = listed_files(target)
        assert {"replaced.txt", "deep/er/file.txt", "model.safetensors"} <= names
        assert "removed.txt" not in names
    assert all(
        ".hasten" in str(folder) or "hasten-hooks" in str(folder)
        for folder in hook_folders
    )
    assert not any(folder.exists() for folder in hook_folders)


def test_load_hooks_find_what_save_hooks_wrote(tmp_path: Path) -> None:
    target = tmp_path / "checkpoint-10"
    accelerator, _ = run(
        1.0, hook=lambda folder: hook_writing("mine/a.txt", 1.0)(folder)
    )
    texts: list[str] = []
    accelerator.register_load_state_pre_hook(
        lambda models, folder: texts.append(
            (Path(folder) / "mine" / "a.txt").read_text()
        )
    )
    for _ in range(2):
        accelerator.save_state(target)
        accelerator.load_state(target)
    assert texts == ["1.0", "1.0"]


def test_a_hook_may_write_files_that_the_save_writes_too(
    target: str, caplog: pytest.LogCaptureFixture
) -> None:
    def hook(folder: Path) -> None:
        shutil.rmtree(folder)
        folder.mkdir()
        (folder / "model.safetensors").write_text("not one")
        (folder / "optimizer.bin").mkdir()

    accelerator, _ = run(1.0, hook=hook)
    accelerator.save_state(target)
    assert load_value(target) == 1.0
    assert "model.safetensors, which a save hook wrote, is replaced" in caplog.text


def test_a_hook_may_remove_its_folder(target: str) -> None:
    accelerator, _ = run(1.0, hook=shutil.rmtree)
    accelerator.save_state(target)
    assert load_value(target) == 1.0


@pytest.mark.parametrize(
    "written_kind", ["manifest", "fifo", "outside", "folder outside"]
)
def test_what_cannot_be_part_of_a_checkpoint_is_refused(
    target: str, tmp_path: Path, written_kind: str
) -> None:
    def hook(folder: Path) -> None:
        if written_kind == "manifest":
            (folder / "manifest.json").write_text("{}")
        elif written_kind == "fifo":
            os.mkfifo(folder / "pipe")
        else:
            (folder / "link").symlink_to(
                tmp_path if written_kind == "folder outside" else Path(__file__)
            )

    accelerator, _ = run(1.0, hook=hook)
    kind = UnsafeCheckpointError if "outside" in written_kind else CheckpointError
    with pytest.raises(
        kind,
        match=r"a save hook wrote manifest\.json|is not a plain file|is a link that leads out",
    ):
        accelerator.save_state(target)
    store, name = locate(target)
    assert name not in store.names()
