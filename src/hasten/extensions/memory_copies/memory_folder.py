"""In-memory folder of a machine (/dev/shm): the newest states of its ranks and of the ranks of another machine."""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Final

from hasten.checkpoint.format.manifest import (
    MANIFEST_NAME,
    FileRecord,
    Manifest,
    checkpoint_number,
    decode_manifest,
    numbered_checkpoint,
    resolve_inside,
)
from hasten.checkpoint.reader import verify_files
from hasten.checkpoint.store.local_store import LocalStore
from hasten.errors import CheckpointError, ConfigError


@dataclass(frozen=True, slots=True)
class MemoryCopy:
    """The state of the ranks of one machine after an update."""

    ranks: tuple[int, ...]
    world_size: int
    step: int


@dataclass(frozen=True, slots=True)
class MemoryChoice:
    """The newest step for which the state of every machine is available on some machine."""

    step: int
    sources: tuple[int, ...]
    """For each machine, the machine that has its state: itself, or the neighbour with a copy."""


MachineRanks = Sequence[tuple[int, ...]]
"""The ranks of each machine."""


def group_by_folder(folders: Sequence[str]) -> list[tuple[int, ...]]:
    """Return the ranks of each machine, identified by the rank's in-memory folder, in order of their first ranks."""
    ranks_by_folder: dict[str, list[int]] = {}
    for rank, folder in enumerate(folders):
        ranks_by_folder.setdefault(folder, []).append(rank)
    return list(map(tuple, ranks_by_folder.values()))


def neighbour_of(machine: int, count: int) -> int:
    """Return the machine that stores a copy of this machine's state."""
    return (machine + 1) % count


def newest_common(
    copies_of_machines: Sequence[Collection[MemoryCopy]], machines: MachineRanks
) -> MemoryChoice | None:
    """Return the step to resume from, given the copies that each machine holds; None when some state is lost."""
    world_size = sum(map(len, machines))
    steps = {copy.step for copy in chain(*copies_of_machines)}
    for step in sorted(steps, reverse=True):
        sources = []
        for machine, ranks in enumerate(machines):
            wanted_copy = MemoryCopy(ranks, world_size, step)
            has_copy = [wanted_copy in copies for copies in copies_of_machines]
            if has_copy[machine]:
                sources.append(machine)
            elif any(has_copy):
                sources.append(has_copy.index(True))
        if len(sources) == len(machines):
            return MemoryChoice(step, tuple(sources))
    return None


def explain_loss(
    copies_of_machines: Sequence[Collection[MemoryCopy]], machines: MachineRanks
) -> str:
    """Return the reason why no step is available to resume from, as text."""
    all_copies = set(chain(*copies_of_machines))
    if not all_copies:
        return "no machine holds a copy of it"
    world_size = sum(map(len, machines))
    fitting_copies = set()
    for copy in all_copies:
        if copy.world_size == world_size and copy.ranks in machines:
            fitting_copies.add(copy)
    if not fitting_copies:
        world_sizes = sorted({copy.world_size for copy in all_copies})
        return (
            f"the copies are of a run on {', '.join(map(str, world_sizes))} processes in another layout, and this one has {world_size} "
            f"on {len(machines)} machines"
        )
    newest_step = max(copy.step for copy in fitting_copies)
    held_ranks = {copy.ranks for copy in fitting_copies if copy.step == newest_step}
    lost_machines = []
    for machine_index, ranks in enumerate(machines):
        if ranks not in held_ranks:
            lost_machines.append(str(machine_index))
    return f"no machine holds the state that machine {', '.join(lost_machines)} had after update {newest_step}"


_ARRIVING_FOLDER: Final = ".arriving"


@dataclass(frozen=True, slots=True)
class MemoryFolder:
    """States by the ranks they belong to; each is a separate checkpoint, either complete or absent."""

    root: Path

    @classmethod
    def of_this_process(cls, root: Path) -> MemoryFolder:
        """Return the folder of this process's n-th Accelerator, the n-th on every rank and after every restart."""
        user_file = f".user-{os.getpid()}-{_start_time()}"
        for number in range(1 << 10):
            folder = root / str(number)
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            try:
                (folder / user_file).touch(mode=0o600, exist_ok=False)
            except FileExistsError:  # taken by an earlier Accelerator
                continue
            return cls(folder)
        raise ConfigError(
            f"this process has made {1 << 10} Accelerators with checkpoint_in_memory, so their copies cannot be told apart any more. Make "
            "fewer, or leave checkpoint_in_memory out."
        )

    def open_store(self, ranks: Sequence[int]) -> LocalStore:
        """Return the store with the states of these ranks."""
        return LocalStore(self._ranks_folder(ranks))

    def _ranks_folder(self, ranks: Sequence[int]) -> Path:
        return self.root / f"ranks_{ranks[0]}-{ranks[-1]}"

    def state_folder(self, copy: MemoryCopy) -> Path:
        """Return the folder of one state."""
        return self._ranks_folder(copy.ranks) / numbered_checkpoint(copy.step)

    def list_states(self) -> list[MemoryCopy]:
        """Return the states that are complete and undamaged: every file is read and its checksums are verified."""
        sound_copies = []
        for ranks_folder in sorted(self.root.glob("ranks_*")):
            store = LocalStore(ranks_folder)
            for checkpoint_name in store.names():
                try:
                    manifest, folder = store.open_manifest(checkpoint_name)
                    is_sound = not verify_files(folder, manifest.files)
                # interrupted by the kill that preceded this restart
                except (CheckpointError, OSError):
                    continue
                step = checkpoint_number(checkpoint_name)
                if is_sound and step is not None:
                    sound_copies.append(
                        MemoryCopy(manifest.ranks, manifest.world_size, step)
                    )
        return sound_copies

    def read_manifest(self, copy: MemoryCopy) -> bytes:
        """Return the encoded manifest of a state."""
        return (self.state_folder(copy) / MANIFEST_NAME).read_bytes()

    def keep_only(self, steps: Collection[int]) -> None:
        """Delete the states of all other steps. Ranks: the first of the machine."""
        for ranks_folder in self.root.glob("ranks_*"):
            for step_folder in filter(Path.is_dir, list(ranks_folder.iterdir())):
                step = checkpoint_number(step_folder.name)
                if step is not None and step not in steps:
                    # incomplete from now on
                    (step_folder / MANIFEST_NAME).unlink(missing_ok=True)
                    shutil.rmtree(step_folder, ignore_errors=True)

    def free_bytes(self) -> int:
        """Return the number of free bytes."""
        return shutil.disk_usage(self.root).free

    # -- states of other machines ---------------------------------------------------------------------------------
    def arriving_folder(self, copy: MemoryCopy) -> Path:
        """Return the folder with the files of a state that is being received."""
        return (
            self._ranks_folder(copy.ranks)
            / _ARRIVING_FOLDER
            / numbered_checkpoint(copy.step)
        )

    @contextmanager
    def receive_state(
        self, copy: MemoryCopy, raw: bytes, alike: Sequence[FileRecord], like: Path
    ) -> Iterator[Manifest]:
        """Context manager for receiving a state: files arrive in the block, except `alike`, linked from `like`.

        It becomes visible at the end, if every file matches the manifest. Ranks: the first of the machine.
        """
        draft = self.arriving_folder(copy)
        shutil.rmtree(draft.parent, ignore_errors=True)
        draft.mkdir(mode=0o700, parents=True)
        manifest = decode_manifest(raw, str(draft / MANIFEST_NAME))
        for file in manifest.files:
            file_path = resolve_inside(draft, file.name)
            file_path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            if file in alike:
                os.link(like / file.name, file_path)
            elif not file.size:
                file_path.touch(mode=0o600)
        yield manifest
        received_files = [file for file in manifest.files if file not in alike]
        if problems := verify_files(draft, received_files):
            raise CheckpointError(
                f"the copy of the state of ranks {list(copy.ranks)} arrived damaged ({'; '.join(problems[:3])}), so it could not be used "
                "after a failure. Look for a faulty network card or memory on both machines."
            )
        (draft / MANIFEST_NAME).write_bytes(raw)
        target = self.state_folder(copy)
        shutil.rmtree(target, ignore_errors=True)
        draft.rename(target)
        draft.parent.rmdir()


def _start_time() -> str:
    """Return the start of this process in clock ticks, because process ids repeat; "0" without /proc."""
    try:
        return Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return "0"
