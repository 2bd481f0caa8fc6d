"""Opening a checkpoint: all files are verified before anything in memory changes."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from hasten.checkpoint.base import CheckpointStore, Json
from hasten.checkpoint.format.formats import SUFFIX, Piece, TensorFile, read_by_sidecar, read_tensors
from hasten.checkpoint.format.manifest import FileRecord, Manifest, inside, summing_like
from hasten.checkpoint.store.disk import ChunkReader, default_threads
from hasten.checkpoint.store.outside_files import size_of
from hasten.comm.agreement import Agreement, agreeing
from hasten.comm.base import Comm
from hasten.errors import CorruptCheckpointError, IncompleteCheckpointError, UnsafeCheckpointError

Progress = Callable[[int], None]
Stamp = tuple[int, int, int, int] | None


@dataclass(frozen=True, slots=True)
class FoundComponent:
    """A component as read from the files: pieces by name, and its JSON."""

    name: str
    kind: str
    pieces: dict[str, list[Piece]] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    data: Json = None

    def of(self, key: str) -> list[Piece] | None:
        """Return the pieces of a tensor under this name or an alias."""
        return self.pieces.get(key) or self.pieces.get(self.aliases.get(key, ""))

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
        stamps: Mapping[str, Stamp] | None = None,
    ) -> None:
        """Create a checkpoint; `stamps` identify the verified files, and a file replaced since is refused."""
        self.name = name
        self.manifest = manifest
        self.folder = folder
        self._allow_pickle = allow_pickle
        self._stamps = stamps or {}
        self._names = frozenset(file.name for file in manifest.files)

    def component(self, name: str, rank: int | None = None) -> FoundComponent:
        """Return a component; of a per-rank component, the state of `rank`.

        Raises: IncompleteCheckpointError when the checkpoint has no such component.
        """
        record = self.manifest.components.get(name)
        files = self.manifest.files_of(name, rank if record is not None and record.per_rank else None)
        if record is None or not files:
            whose = f" of rank {rank}" if record is not None else ""
            raise IncompleteCheckpointError(
                f"{self.folder} has no {name!r}{whose}; it holds {sorted(self.manifest.components)} of "
                f"{self.manifest.world_size} ranks. Nothing was loaded. Prepare and register what was there when it "
                "was saved, or load with strict=False."
            )
        found = FoundComponent(name, record.kind)
        data = None
        for file in files:
            content = self._content(file.name)
            for key, piece in content.pieces.items():
                known = found.pieces.setdefault(key, [])
                if known and known[0].data.dtype != piece.data.dtype:
                    raise CorruptCheckpointError(
                        f"{self.folder / file.name}: {key} has two dtypes. Nothing was loaded."
                    )
                known.append(piece)
            found.aliases.update(content.aliases)
            data = content.data if content.data is not None else data
        return FoundComponent(name, record.kind, found.pieces, found.aliases, data)

    def _content(self, file: str) -> TensorFile:
        path, beside = inside(self.folder, file), file + SUFFIX
        if beside in self._names:
            content = read_by_sidecar(path, inside(self.folder, beside))
            self._check_same(beside)
        else:
            content = read_tensors(path, self._allow_pickle)
        self._check_same(file)
        return content

    def _check_same(self, file: str) -> None:
        """Raise CorruptCheckpointError unless the file is still the one that was verified."""
        if self._stamps and stamp(self.folder / file) != self._stamps.get(file):
            raise CorruptCheckpointError(
                f"{self.folder / file}: was replaced or changed after it was verified, so it may not be part of this "
                "checkpoint. Nothing was loaded. Let whoever writes there finish, and load again."
            )


def stamp(path: Path) -> Stamp:
    """Return device, inode, size and modification time of a file, to detect replacement; None if it is missing."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def verify_files(
    folder: Path, files: Sequence[FileRecord], chunk_bytes: int, progress: Progress | None = None
) -> list[str]:
    """Return the problems of the files, one line each: missing, wrong size, wrong checksum. Empty means sound."""
    problems = {file.name: problem for file in files if (problem := _at_first_sight(folder, file)) is not None}
    reader = ChunkReader()
    paths = {file.name: inside(folder, file.name) for file in files}
    jobs = [(file, i) for file in files if file.name not in problems for i in range(len(file.sums))]

    def check(job: tuple[FileRecord, int]) -> str | None:
        file, index = job
        start, stop = index * chunk_bytes, min((index + 1) * chunk_bytes, file.size)
        try:
            return reader.checksum(paths[file.name], start, stop, summing_like(file.sums[index]))
        except OSError as error:
            problems[file.name] = f"{file.name} cannot be read: {error}"
            return None

    bad: dict[str, list[int]] = {}
    with ThreadPoolExecutor(default_threads(), thread_name_prefix="hasten-verify") as pool:
        for (file, index), now in zip(jobs, pool.map(check, jobs), strict=True):
            if now != file.sums[index]:
                bad.setdefault(file.name, []).append(index)
            if progress is not None:
                progress(min(chunk_bytes, file.size - index * chunk_bytes))
    for file in files:
        if file.name in bad:
            found = f"{file.name} has a wrong checksum in chunks {bad[file.name][:4]} of {len(file.sums)}"
            problems.setdefault(file.name, found)
    return [problems[file.name] for file in files if file.name in problems]


def _at_first_sight(folder: Path, file: FileRecord) -> str | None:
    """Return the problem of a file that shows without reading its content; None if there is none."""
    path = inside(folder, file.name)
    try:
        size = size_of(path)
    except FileNotFoundError:
        return f"{file.name} is missing"
    except UnsafeCheckpointError:
        return f"{file.name} is a pipe, a device or a folder instead of a file"
    except OSError as error:
        return f"{file.name} cannot be read: {error}"
    return None if size == file.size else f"{file.name} has {size} bytes instead of {file.size} (truncated or replaced)"


@contextmanager
def open_checkpoint(
    store: CheckpointStore, name: str, comm: Comm, *, verify: bool = True, allow_pickle: bool = False
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
            folder = _folder(store, name, manifest, together, stack)
            together.label = f"verifying {name!r}"
            stamps = _verify_together(folder, manifest, together) if verify else None
        yield Checkpoint(name, manifest, folder, allow_pickle, stamps)


def _folder(store: CheckpointStore, name: str, manifest: Manifest, together: Agreement, stack: ExitStack) -> Path:
    """Return the folder to read from: the local one, else that of the machine's first rank, else a separate download.

    Mapped files stay readable after the rank that downloaded them has deleted them. Ranks: every rank.
    """
    if not store.remote or together.comm.size == 1:
        return stack.enter_context(store.fetch(name, manifest.files))
    here = platform.node()
    hosts: list[str] = together.share(here)
    mine = None
    if together.comm.rank == hosts.index(here):
        mine = stack.enter_context(store.fetch(name, manifest.files))
    folders: list[str | None] = together.share(None if mine is None else str(mine))
    if mine is not None:
        return mine
    first = next(Path(place) for host, place in zip(hosts, folders, strict=True) if host == here and place is not None)
    if all((first / file.name).exists() for file in manifest.files):
        return first
    return stack.enter_context(store.fetch(name, manifest.files))  # same host name, but a different file system


def _verify_together(folder: Path, manifest: Manifest, together: Agreement) -> dict[str, Stamp]:
    """Verify a share of the files on every rank and return the stamps taken before. Ranks: every rank."""
    mine = share_out(manifest.files, together.comm.rank, together.comm.size)
    stamps = {file.name: stamp(folder / file.name) for file in manifest.files}
    together.share()  # every rank has taken its stamps before any rank starts to verify
    check_sound(folder, mine, manifest.chunk_bytes)
    return stamps


def check_sound(folder: Path, files: Sequence[FileRecord], chunk_bytes: int) -> None:
    """Raise unless every file exists with its size and checksums."""
    problems = verify_files(folder, files, chunk_bytes)
    if not problems:
        return
    kind = IncompleteCheckpointError if all("missing" in line for line in problems) else CorruptCheckpointError
    raise kind(
        f"{folder}: {'; '.join(problems[:5])}{' ...' if len(problems) > 5 else ''}. Nothing was loaded. "
        "Load an earlier checkpoint (`hasten ckpt verify` says which are sound)."
    )


def share_out(files: Sequence[FileRecord], rank: int, size: int) -> list[FileRecord]:
    """Return this rank's share of the files, balanced by bytes."""
    loads, mine = [0] * size, []
    for file in sorted(files, key=lambda file: (-file.size, file.name)):
        lightest = loads.index(min(loads))
        loads[lightest] += file.size + 4096
        if lightest == rank:
            mine.append(file)
    return mine
