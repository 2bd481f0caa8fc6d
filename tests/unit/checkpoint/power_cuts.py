"""A program that saves, dies at a chosen system call, and checks from outside what is left. Run as a script.

For every change of the disk a save makes (or every so many-th), and for several ways to die there, it forks a child that saves and dies, then
looks at the folder as the next run would: every checkpoint that was complete before must still load, whatever is chosen
as the newest must be whole, and the next save must clear the leftovers away and succeed.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch

from hasten import ProjectConfiguration
from hasten.checkpoint.base import Component, StateTree
from hasten.checkpoint.format.manifest import (
    Manifest,
    draft_of,
    numbered_checkpoint,
    read_manifest,
)
from hasten.checkpoint.format.packing import pack
from hasten.checkpoint.reader import open_checkpoint
from hasten.checkpoint.retention import retire_expired
from hasten.checkpoint.save import Save
from hasten.checkpoint.store.disk import Disk
from hasten.checkpoint.store.local_store import LocalStore
from hasten.comm.agreement import agreeing
from hasten.comm.local import LocalComm
from hasten.state.load_source import find_newest

DEATH_KINDS = ("before", "after", "half", "power")
SIZES = (3000, 700)
# syncs cost nothing in memory, and kills need no disk
FAST = "/dev/shm" if Path("/dev/shm").is_dir() else None


class DeadlyDisk(Disk):
    """Counts its calls and kills the process at one of them.

    before/after: at the call's edge. half: in the middle of a write or a removal. power: after it, and everything that
    was not synced is lost, as when the machine loses power.
    """

    def __init__(self, fatal_call: int = -1, death_kind: str = "before") -> None:
        self.calls = 0
        self._fatal_call = fatal_call
        self._death_kind = death_kind
        self._unsynced: dict[int, Path] = {}
        self._lost: set[Path] = set()

    def _die(self) -> None:
        if self._death_kind == "power":
            for path in self._lost:
                if path.exists():
                    os.truncate(path, 0)
        os.kill(os.getpid(), signal.SIGKILL)

    def _run_call(
        self, action: Callable[[], None], half: Callable[[], None] | None = None
    ) -> None:
        self.calls += 1
        is_fatal = self.calls - 1 == self._fatal_call
        if is_fatal and self._death_kind == "before":
            self._die()
        if is_fatal and self._death_kind == "half" and half is not None:
            half()
            self._die()
        try:
            action()
        finally:
            if is_fatal:
                self._die()

    def create(self, path: Path) -> int:
        descriptors: list[int] = []
        self._run_call(lambda: descriptors.append(Disk.create(self, path)))
        self._unsynced[descriptors[0]] = path
        self._lost.add(path)
        return descriptors[0]

    def write_at(self, fd: int, data: Sequence[memoryview], offset: int) -> int:
        written_counts: list[int] = []
        joined_data = memoryview(b"".join(data))
        self._run_call(
            lambda: written_counts.append(Disk.write_at(self, fd, data, offset)),
            lambda: written_counts.append(
                Disk.write_at(self, fd, [joined_data[: len(joined_data) // 2]], offset)
            ),
        )
        return written_counts[0]

    def sync(self, fd: int) -> None:
        self._run_call(lambda: Disk.sync(self, fd))
        self._lost.discard(self._unsynced.get(fd, Path()))

    def make_folder(self, path: Path) -> None:
        self._run_call(lambda: Disk.make_folder(self, path))

    def rename(self, old: Path, new: Path) -> None:
        self._run_call(lambda: Disk.rename(self, old, new))
        self._lost = {
            new / p.relative_to(old) if p.is_relative_to(old) else p for p in self._lost
        }

    def remove_tree(self, path: Path) -> None:
        def half() -> None:
            for entry in sorted(entry for entry in path.rglob("*") if entry.is_file())[
                ::2
            ]:
                entry.unlink()

        self._run_call(lambda: Disk.remove_tree(self, path), half)

    def remove_file(self, path: Path) -> None:
        self._run_call(lambda: Disk.remove_file(self, path))

    def link(self, old: Path, new: Path) -> None:
        self._run_call(lambda: Disk.link(self, old, new))

    def open_lock(self, path: Path) -> int:
        descriptors: list[int] = []
        self._run_call(lambda: descriptors.append(Disk.open_lock(self, path)))
        return descriptors[0]


def numbered_state(number: int) -> StateTree:
    """A small state that says in every tensor which save it belongs to."""
    tensors = {
        f"w{i}": torch.full((size,), float(number)) for i, size in enumerate(SIZES)
    }
    data, nested = pack(
        {"state": {"w0": {"m": torch.full((500,), float(number))}}, "number": number}
    )
    return StateTree(
        {
            "model": Component(tensors, None, "model"),
            "optimizer": Component(nested, data, "optimizer", "torch"),
            "random_states": Component({}, {"number": number}, "random", per_rank=True),
            **{
                f"custom_checkpoint_{i}": Component({}, {"number": number})
                for i in range(6)
            },
        }
    )


def save(
    root: Path,
    name: str,
    number: int,
    disk: Disk,
    limit: int | None,
    extra: str | None = None,
) -> None:
    """One save of one process, with retention; `extra` is a folder that a hook makes in the checkpoint."""
    store, comm = LocalStore(root, disk, threads=1), LocalComm()
    with agreeing(comm, "saving") as together, Save(store, comm) as save:
        save.start(together, name)
        if extra is not None and save.draft.folder is not None:
            (save.draft.folder / extra).mkdir()
            (save.draft.folder / extra / "hooked.txt").write_text(str(number))
        save.plan(numbered_state(number), together)
        save.write(Manifest(number=number), together)
    retire_expired(
        store, ProjectConfiguration(total_limit=limit), lambda manifest: True
    )


def saved_number(root: Path, name: str) -> int:
    """The number a checkpoint was saved with, after reading all of it."""
    with ExitStack() as stack:
        checkpoint = stack.enter_context(
            open_checkpoint(LocalStore(root), name, LocalComm())
        )
        model = checkpoint.component("model")
        numbers = {
            value
            for key in model.pieces
            for value in model.pieces[key][0].data.tolist()
        }
        optimizer = checkpoint.component("optimizer")
        numbers |= set(optimizer.pieces["state/w0/m"][0].data.tolist())
        for path in checkpoint.folder.rglob("*.txt"):
            if path.name == "hooked.txt" and f"{path.parent.name}/hooked.txt" in {
                f.name for f in checkpoint.manifest.files
            }:
                numbers.add(float(path.read_text()))
        extra = checkpoint.component("random_states", 0).data
        assert isinstance(extra, dict)
        numbers.add(float(str(extra["number"])))
        assert len(numbers) == 1, f"{name} mixes {numbers}"
        assert numbers == {float(checkpoint.manifest.number or 0)}
        return int(numbers.pop())


def in_child(work: Callable[[], None]) -> int:
    """Fork, run, and return how the child ended (negative: the signal)."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        except BaseException:
            os._exit(3)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def kill_everywhere(
    ready: Callable[[Path], None],
    scenario: Callable[[Path, Disk], None],
    judge: Callable[[Path], str | None],
    stride: int,
    death_kinds: Sequence[str] = DEATH_KINDS,
) -> tuple[int, list[str]]:
    """Die at every call of the scenario in every way; how often the child was killed, and what was wrong after it.

    A stride takes every so many-th of these deaths; one that does not divide the number of ways meets them all.
    """
    kills, problems = 0, []
    with tempfile.TemporaryDirectory(dir=FAST) as folder:
        initial_folder, root = Path(folder) / "before", Path(folder) / "now"
        ready(initial_folder)
        shutil.copytree(initial_folder, root)
        counting = DeadlyDisk()
        scenario(root, counting)
        for fatal_call, death_kind in itertools.islice(
            itertools.product(range(counting.calls), death_kinds), 0, None, stride
        ):
            shutil.rmtree(root)
            shutil.copytree(initial_folder, root)
            ended = in_child(
                functools.partial(scenario, root, DeadlyDisk(fatal_call, death_kind))
            )
            kills += ended == -signal.SIGKILL
            try:
                problem = (
                    judge(root)
                    if ended == -signal.SIGKILL
                    else f"the child ended with {ended}"
                )
            except Exception as error:
                problem = f"{type(error).__name__}: {error}"
            if problem is not None:
                problems.append(
                    f"{scenario.__name__}, call {fatal_call} ({death_kind}): {problem}"
                )
    return kills, problems


def before_numbered(root: Path) -> None:
    for i in range(3):
        save(root, numbered_checkpoint(i), i, Disk(), None)


def save_numbered(root: Path, disk: Disk) -> None:
    """checkpoint_0..2 exist, checkpoint_3 is being saved with total_limit=2 when the process dies."""
    save(root, numbered_checkpoint(3), 3, disk, 2)


def judge_numbered(root: Path) -> str | None:
    store = LocalStore(root)
    top = find_newest(store) or ""
    if saved_number(root, top) not in (2, 3):
        return f"the newest is {top}"
    if saved_number(root, numbered_checkpoint(2)) != 2:
        return "checkpoint_2 was lost"
    if top != numbered_checkpoint(3) and {
        numbered_checkpoint(0),
        numbered_checkpoint(1),
    } - set(store.names()):
        return "old ones were deleted before the new one was there"
    save(root, numbered_checkpoint(4), 4, Disk(), 2)
    left = {entry.name for entry in root.iterdir()}
    if saved_number(root, find_newest(store) or "") != 4 or any(
        name.startswith(".hasten") for name in left
    ):
        return f"the next save left {left}"
    return None


def before_overwriting(root: Path) -> None:
    save(root, "best", 1, Disk(), None, extra="gone")
    (root / "best" / "notes.txt").write_text("mine")


def save_overwriting(root: Path, disk: Disk) -> None:
    """A folder given by name is saved over, with a file of the user's in it, when the process dies.

    Each save has a file that the one before has not, in a folder of its own as a hook writes it.
    """
    save(root, "best", 2, disk, None, extra="new")


def judge_overwriting(root: Path, allowed: tuple[int, int] = (1, 2)) -> str | None:
    if saved_number(root, "best") not in allowed:
        return "neither the old nor the new one is there"
    save(root, "best", 4, Disk(), None)
    left = [entry.name for entry in root.iterdir()]
    if saved_number(root, "best") != 4 or left != ["best"]:
        return f"the next save left {left}"
    listed = {file.name for file in LocalStore(root).manifest("best").files} | {
        "manifest.json",
        "notes.txt",
    }
    present_files = {
        path.relative_to(root / "best").as_posix()
        for path in (root / "best").rglob("*")
    }
    if present_files != listed:
        return f"the next save left {present_files - listed} and lacks {listed - present_files}"
    return (
        None
        if (root / "best" / "notes.txt").read_text() == "mine"
        else "the user's file was lost"
    )


def before_recovering(root: Path) -> None:
    """The folder as a process leaves it that dies when the new checkpoint is there but its files have no names yet."""
    for fatal_call in itertools.count():
        shutil.rmtree(root, ignore_errors=True)
        before_overwriting(root)
        in_child(
            functools.partial(save_overwriting, root, DeadlyDisk(fatal_call, "after"))
        )
        if draft_of(read_manifest(root / "best" / "manifest.json")) is not None:
            return


def save_recovering(root: Path, disk: Disk) -> None:
    """What a crash left is brought to its end by the next save, which dies too."""
    save(root, "best", 3, disk, None, extra="newer")


def judge_recovering(root: Path) -> str | None:
    return judge_overwriting(root, (2, 3))


def judge_appearing(root: Path) -> str | None:
    """Before the folder comes into being there is nothing; afterwards the user's file is there whatever happens."""
    if not (root / "best" / "manifest.json").exists():
        (root / "best").mkdir(exist_ok=True)
        (root / "best" / "notes.txt").write_text("mine")
        save(root, "best", 2, Disk(), None)
    return judge_overwriting(root)


def before_appearing(root: Path) -> None:
    root.mkdir()


def save_appearing(root: Path, disk: Disk) -> None:
    """The folder comes into being while the save is under way, with a file of the user's in it."""
    store, comm = LocalStore(root, disk, threads=1), LocalComm()
    with agreeing(comm, "saving") as together, Save(store, comm) as save:
        save.start(together, "best")
        (root / "best").mkdir()
        (root / "best" / "notes.txt").write_text("mine")
        save.plan(numbered_state(2), together)
        save.write(Manifest(number=2), together)


def kill_during(save_kind: str, stride: int) -> tuple[int, list[str]]:
    """The kills of one kind of save, and what was wrong after them."""
    match save_kind:
        case "numbered":
            return kill_everywhere(
                before_numbered, save_numbered, judge_numbered, stride
            )
        case "overwriting":
            return kill_everywhere(
                before_overwriting, save_overwriting, judge_overwriting, stride
            )
        case _:
            kills, problems = kill_everywhere(
                before_recovering, save_recovering, judge_recovering, stride, ("after",)
            )
            appearing_kills, appearing_problems = kill_everywhere(
                before_appearing, save_appearing, judge_appearing, stride, ("after",)
            )
            return kills + appearing_kills, problems + appearing_problems


def main(stride: int, save_kinds: Sequence[str]) -> None:
    torch.set_num_threads(1)
    reports_by_kind = {
        save_kind: kill_during(save_kind, stride) for save_kind in save_kinds
    }
    problems = [
        problem
        for _, problems_of_kind in reports_by_kind.values()
        for problem in problems_of_kind
    ]
    json.dump(
        {
            "kills": {
                save_kind: kills for save_kind, (kills, _) in reports_by_kind.items()
            },
            "problems": problems,
        },
        sys.stdout,
    )


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
