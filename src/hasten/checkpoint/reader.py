"""Opening a checkpoint: all files are verified before anything in memory changes."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeVar

from hasten.checkpoint.base import CheckpointStore, Json
from hasten.checkpoint.format.formats import (
    Piece,
    TensorFile,
    read_tensors,
)
from hasten.checkpoint.format.manifest import (
    CHUNK_BYTES,
    FileRecord,
    Manifest,
    resolve_inside,
    size_of,
)
from hasten.checkpoint.store.disk import default_threads, file_checksum
from hasten.comm.agreement import Agreement, agreeing
from hasten.comm.base import Comm
from hasten.errors import (
    CheckpointError,
    CheckpointReplacedError,
    CorruptCheckpointError,
    IncompleteCheckpointError,
    UnsafeCheckpointError,
)
from hasten.runtime.mesh_plan import AXES, BATCH

Progress = Callable[[int], None]
R = TypeVar("R")
READING_TRIES: Final = 20
Stamp = tuple[int, int, int, int] | None


@dataclass(frozen=True, slots=True)
class FoundComponent:
    """A component as read from the files: pieces by name, and its JSON."""

    name: str
    kind: str
    pieces: dict[str, list[Piece]] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    data: Json = None

    def of(self, key: str) -> list[Piece]:
        """Return the pieces of a tensor under this name or an alias; empty when there is none."""
        return self.pieces.get(key) or self.pieces.get(self.aliases.get(key, ""), [])

    def keys(self) -> set[str]:
        """Return all names, aliases included."""
        return set(self.pieces) | set(self.aliases)


class Checkpoint:
    """An open checkpoint. Files are memory-mapped and read when copied from."""

    def __init__(
        self,
        name: str,
        manifest: Manifest,
        folder: Path,
        allow_pickle: bool = False,
        is_current: Callable[[], bool] = lambda: True,
    ) -> None:
        """Open a checkpoint; `is_current` returns False once another save has replaced it."""
        self.name = name
        self.manifest = manifest
        self.folder = folder
        self._allow_pickle = allow_pickle
        self._stamps: Mapping[str, Stamp] = {}
        """Identities of the verified files; a file that was replaced since is refused."""
        self.is_current = is_current

    def same_data(self, world_size: int, mesh: Mapping[str, int]) -> bool:
        """Return True if each rank of a run reads the samples that the same rank read in the saved run."""
        saved = self.manifest.mesh
        for axis in AXES if saved and mesh else ():
            if axis not in BATCH and saved.get(axis, 1) != mesh.get(axis, 1):
                return False
        return self.manifest.world_size == world_size

    def component(self, name: str, rank: int | None = None) -> FoundComponent:
        """Return a component; of a per-rank component, the state of `rank`.

        Raises: IncompleteCheckpointError when the checkpoint has no such component.
        """
        record = self.manifest.components.get(name)
        files = self.manifest.files_of(
            name, rank if record is not None and record.per_rank else None
        )
        if record is None or not files:
            whose = f" of rank {rank}" if record is not None else ""
            raise IncompleteCheckpointError(
                f"{self.folder} has no {name!r}{whose}; it holds {sorted(self.manifest.components)} of "
                f"{self.manifest.world_size} ranks. Nothing was loaded. Prepare and register what was there when it "
                "was saved, or load with strict=False."
            )
        pieces: dict[str, list[Piece]] = {}
        aliases: dict[str, str] = {}
        data = None
        for file in files:
            content = self._read(file.name)
            for key, piece in content.pieces.items():
                known = pieces.setdefault(key, [])
                if known and known[0].data.dtype != piece.data.dtype:
                    raise CorruptCheckpointError(
                        f"{self.folder / file.name}: {key} has two dtypes. Nothing was loaded."
                    )
                known.append(piece)
            aliases.update(content.aliases)
            data = content.data if content.data is not None else data
        return FoundComponent(name, record.kind, pieces, aliases, data)

    def verify(self, together: Agreement) -> None:
        """Verify a share of the files on every rank, after stamping all of them. Ranks: every rank."""
        files = self.manifest.files
        stamps = {}
        for file in files:
            stamps[file.name] = stamp(self.folder / file.name)
        # every rank has taken its stamps before any rank starts to verify
        together.share()
        share = files if together.comm.size == 1 else _share_of(files, together.comm)
        problems = verify_files(self.folder, share)
        if problems:
            self.check_current()
            kind = (
                IncompleteCheckpointError
                if all("missing" in line for line in problems)
                else CorruptCheckpointError
            )
            raise kind(
                f"{self.folder}: {'; '.join(problems[:5])}{' ...' if len(problems) > 5 else ''}. Nothing was loaded. "
                "Load an earlier checkpoint (`hasten ckpt verify` says which are sound)."
            )
        self._stamps = stamps

    def check_current(self) -> None:
        """Raise CheckpointReplacedError if another save has replaced the checkpoint, so that its files are gone."""
        if not self.is_current():
            raise CheckpointReplacedError(
                f"{self.folder} was replaced by other saves each of the {READING_TRIES} times that it was being read. Nothing was "
                "loaded. Save there less often, or load another checkpoint."
            )

    def _read(self, file: str) -> TensorFile:
        """Map a file. Raises: CorruptCheckpointError unless it is still the one that was verified."""
        try:
            content = read_tensors(
                resolve_inside(self.folder, file), self._allow_pickle
            )
        except (CheckpointError, OSError):
            self.check_current()
            raise
        if self._stamps and stamp(self.folder / file) != self._stamps.get(file):
            self.check_current()
            raise CorruptCheckpointError(
                f"{self.folder / file}: was replaced or changed after it was verified, so it may not be part of this "
                "checkpoint. Nothing was loaded. Wait for the process that writes there, and load again."
            )
        return content


def stamp(path: Path) -> Stamp:
    """Return device, inode, size and modification time of a file, to detect replacement; None if it is missing."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def verify_files(
    folder: Path,
    files: Sequence[FileRecord],
    progress: Progress | None = None,
) -> list[str]:
    """Return the problems of the files, one line each: missing, wrong size, wrong checksum. Empty means sound."""
    problems: dict[str, str] = {}
    jobs: list[tuple[Path, FileRecord, int]] = []
    for file in files:
        path = resolve_inside(folder, file.name)
        if (problem := _visible_problem(path, file)) is not None:
            problems[file.name] = problem
            continue
        for index in range(len(file.sums)):
            jobs.append((path, file, index))

    def verify(job: tuple[Path, FileRecord, int]) -> bool | OSError:
        path, file, index = job
        try:
            start = index * CHUNK_BYTES
            stop = min(start + CHUNK_BYTES, file.size)
            return file_checksum(path, start, stop) == file.sums[index]
        except OSError as error:
            return error

    bad: dict[str, list[int]] = {}
    with ThreadPoolExecutor(
        default_threads(), thread_name_prefix="hasten-verify"
    ) as pool:
        for (_, file, index), sound in zip(jobs, pool.map(verify, jobs), strict=True):
            if isinstance(sound, OSError):
                problems[file.name] = f"cannot be read: {sound}"
            elif not sound:
                bad.setdefault(file.name, []).append(index)
            if progress is not None:
                progress(min(CHUNK_BYTES, file.size - index * CHUNK_BYTES))
    return _lines(files, problems, bad) if problems or bad else []


def _lines(
    files: Sequence[FileRecord], problems: dict[str, str], bad: Mapping[str, list[int]]
) -> list[str]:
    """Return one line per problem, in the order of the files; `bad` are the chunks with a wrong checksum."""
    for file in files:
        if file.name in bad:
            problem = f"has a wrong checksum in chunks {bad[file.name][:4]} of {len(file.sums)}"
            problems.setdefault(file.name, problem)
    return [
        f"{file.name} {problems[file.name]}" for file in files if file.name in problems
    ]


def _visible_problem(path: Path, file: FileRecord) -> str | None:
    """Return the problem of a file that is known without reading its content; None if there is none."""
    try:
        size = size_of(path)
    except FileNotFoundError:
        return "is missing"
    except UnsafeCheckpointError:
        return "is a pipe, a device or a folder instead of a file"
    except OSError as error:
        return f"cannot be read: {error}"
    return (
        None
        if size == file.size
        else f"has {size} bytes instead of {file.size} (truncated or replaced)"
    )


def read_one_version(read: Callable[[], R]) -> R:
    """Return the result of `read`, which is called again if another save replaces the checkpoint meanwhile.

    Ranks: every rank, if `read` is collective.
    """
    for _ in range(READING_TRIES - 1):
        try:
            return read()
        except CheckpointReplacedError:
            continue
    return read()


@contextmanager
def open_checkpoint(
    store: CheckpointStore,
    name: str,
    comm: Comm,
    *,
    verify: bool = True,
    allow_pickle: bool = False,
) -> Iterator[Checkpoint]:
    """Context manager that provides a verified checkpoint.

    Ranks: every rank; the ranks divide the verification, and an error on one rank is raised on all.
    Raises: IncompleteCheckpointError, CorruptCheckpointError, UnsafeCheckpointError or CheckpointVersionError.
    """
    with ExitStack() as stack:
        with agreeing(comm, f"reading the manifest of {name!r}") as together:
            manifest = store.manifest(name)
            together.share()
            together.label = f"fetching {name!r} from {store.address}"
            try:
                if store.remote and comm.size > 1:
                    folder = _download(store, name, manifest, together, stack)
                else:
                    folder = stack.enter_context(store.fetch(name, manifest))
            except CheckpointError:
                Checkpoint(
                    name,
                    manifest,
                    Path(name),
                    is_current=lambda: store.is_current(name, manifest),
                ).check_current()
                raise
            checkpoint = Checkpoint(
                name,
                manifest,
                folder,
                allow_pickle,
                is_current=lambda: store.is_current(name, manifest, folder),
            )
            together.label = f"verifying {name!r}"
            if verify:
                checkpoint.verify(together)
        yield checkpoint


def _download(
    store: CheckpointStore,
    name: str,
    manifest: Manifest,
    together: Agreement,
    stack: ExitStack,
) -> Path:
    """Return the folder to read from: the download of the machine's first rank, else a separate one.

    Mapped files stay readable after the rank that downloaded them has deleted them. Ranks: every rank.
    """
    here = platform.node()
    hosts: list[str] = together.share(here)
    mine = None
    if together.comm.rank == hosts.index(here):
        mine = stack.enter_context(store.fetch(name, manifest))
    folders: list[str | None] = together.share(None if mine is None else str(mine))
    if mine is not None:
        return mine
    first = next(
        Path(place)
        for host, place in zip(hosts, folders, strict=True)
        if host == here and place is not None
    )
    if all((first / file.name).exists() for file in manifest.files):
        return first
    # same host name, but a different file system
    return stack.enter_context(store.fetch(name, manifest))


def _share_of(files: Sequence[FileRecord], comm: Comm) -> Sequence[FileRecord]:
    """Return this rank's share of the files, balanced by bytes."""
    loads, mine = [0] * comm.size, []
    for file in sorted(files, key=lambda file: (-file.size, file.name)):
        lightest = loads.index(min(loads))
        loads[lightest] += file.size + 4096
        if lightest == comm.rank:
            mine.append(file)
    return mine
