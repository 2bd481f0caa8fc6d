"""Opening a checkpoint: all files are verified before anything in memory changes."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from hasten.checkpoint.store.disk import file_checksum, worker_pool
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
ResultType = TypeVar("ResultType")
MAX_READ_ATTEMPTS: Final = 20
FileStamp = tuple[int, int, int, int] | None


@dataclass(frozen=True, slots=True)
class StoredComponent:
    """A component as read from the files: pieces by name, and its JSON."""

    name: str
    kind: str
    pieces: dict[str, list[Piece]] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    data: Json = None

    def pieces_of(self, tensor_name: str) -> list[Piece]:
        """Return the pieces of a tensor under this name or an alias; empty when there is none."""
        return self.pieces.get(tensor_name) or self.pieces.get(
            self.aliases.get(tensor_name, ""), []
        )

    def tensor_names(self) -> set[str]:
        """Return all names, aliases included."""
        return set(self.pieces) | set(self.aliases)


@dataclass(slots=True, eq=False)
class Checkpoint:
    """An open checkpoint. Files are memory-mapped and read when copied from."""

    name: str
    manifest: Manifest
    folder: Path
    _allow_pickle: bool = False
    is_current: Callable[[], bool] = lambda: True
    """Returns False once another save has replaced the checkpoint."""
    _stamps: Mapping[str, FileStamp] = field(default_factory=dict)
    """Identities of the verified files; a file that was replaced since is refused."""

    def same_data(self, world_size: int, mesh: Mapping[str, int]) -> bool:
        """Return True if each rank of a run reads the samples that the same rank read in the saved run."""
        saved_mesh = self.manifest.mesh
        for axis in AXES if saved_mesh and mesh else ():
            if axis not in BATCH and saved_mesh.get(axis, 1) != mesh.get(axis, 1):
                return False
        return self.manifest.world_size == world_size

    def component(self, name: str, rank: int | None = None) -> StoredComponent:
        """Return a component; of a per-rank component, the state of `rank`.

        Raises: IncompleteCheckpointError when the checkpoint has no such component.
        """
        component_record = self.manifest.components.get(name)
        is_per_rank = component_record is not None and component_record.per_rank
        file_records = self.manifest.files_of(name, rank if is_per_rank else None)
        if component_record is None or not file_records:
            rank_words = f" of rank {rank}" if component_record is not None else ""
            raise IncompleteCheckpointError(
                f"{self.folder} has no {name!r}{rank_words}; it holds {sorted(self.manifest.components)} of "
                f"{self.manifest.world_size} ranks. Nothing was loaded. Prepare and register what was there when it "
                "was saved, or load with strict=False."
            )
        pieces: dict[str, list[Piece]] = {}
        aliases: dict[str, str] = {}
        packed_state = None
        for file_record in file_records:
            tensor_file = self._map_file(file_record.name)
            for tensor_name, piece in tensor_file.pieces.items():
                tensor_pieces = pieces.setdefault(tensor_name, [])
                if tensor_pieces and tensor_pieces[0].data.dtype != piece.data.dtype:
                    raise CorruptCheckpointError(
                        f"{self.folder / file_record.name}: {tensor_name} has two dtypes. Nothing was loaded."
                    )
                tensor_pieces.append(piece)
            aliases.update(tensor_file.aliases)
            if tensor_file.data is not None:
                packed_state = tensor_file.data
        return StoredComponent(
            name, component_record.kind, pieces, aliases, packed_state
        )

    def verify(self, agreement: Agreement) -> None:
        """Verify a share of the files on every rank, after stamping all of them. Ranks: every rank."""
        file_records = self.manifest.files
        file_stamps = {}
        for file_record in file_records:
            file_stamps[file_record.name] = file_stamp(self.folder / file_record.name)
        # every rank has taken its stamps before any rank starts to verify
        agreement.share()
        rank_share: Sequence[FileRecord] = file_records
        if agreement.comm.size > 1:
            rank_share = _share_of(file_records, agreement.comm)
        problems = verify_files(self.folder, rank_share)
        if problems:
            self.check_current()
            error_class = (
                IncompleteCheckpointError
                if all("missing" in line for line in problems)
                else CorruptCheckpointError
            )
            raise error_class(
                f"{self.folder}: {'; '.join(problems[:5])}{' ...' if len(problems) > 5 else ''}. Nothing was loaded. "
                "Load an earlier checkpoint (`hasten ckpt verify` says which are sound)."
            )
        self._stamps = file_stamps

    def check_current(self) -> None:
        """Raise CheckpointReplacedError if another save has replaced the checkpoint, so that its files are gone."""
        if not self.is_current():
            raise CheckpointReplacedError(
                f"{self.folder} was replaced by other saves each of the {MAX_READ_ATTEMPTS} times that it was being read. Nothing was "
                "loaded. Save there less often, or load another checkpoint."
            )

    def _map_file(self, file_name: str) -> TensorFile:
        """Map a file. Raises: CorruptCheckpointError unless it is still the one that was verified."""
        try:
            tensor_file = read_tensors(
                resolve_inside(self.folder, file_name), self._allow_pickle
            )
        except (CheckpointError, OSError):
            self.check_current()
            raise
        if self._stamps and file_stamp(self.folder / file_name) != self._stamps.get(
            file_name
        ):
            self.check_current()
            raise CorruptCheckpointError(
                f"{self.folder / file_name}: was replaced or changed after it was verified, so it may not be part of this "
                "checkpoint. Nothing was loaded. Wait for the process that writes there, and load again."
            )
        return tensor_file


def file_stamp(path: Path) -> FileStamp:
    """Return device, inode, size and modification time of a file, to detect replacement; None if it is missing."""
    try:
        file_status = path.stat()
    except OSError:
        return None
    return (
        file_status.st_dev,
        file_status.st_ino,
        file_status.st_size,
        file_status.st_mtime_ns,
    )


def verify_files(
    folder: Path,
    file_records: Sequence[FileRecord],
    progress: Progress | None = None,
) -> list[str]:
    """Return the problems of the files, one line each: missing, wrong size, wrong checksum. Empty means sound."""
    problems: dict[str, str] = {}
    chunk_jobs: list[tuple[Path, FileRecord, int]] = []
    for file_record in file_records:
        file_path = resolve_inside(folder, file_record.name)
        if (problem := _find_visible_problem(file_path, file_record)) is not None:
            problems[file_record.name] = problem
            continue
        for chunk_index in range(len(file_record.sums)):
            chunk_jobs.append((file_path, file_record, chunk_index))

    def verify(job: tuple[Path, FileRecord, int]) -> bool | OSError:
        file_path, file_record, chunk_index = job
        try:
            start = chunk_index * CHUNK_BYTES
            stop = min(start + CHUNK_BYTES, file_record.size)
            return (
                file_checksum(file_path, start, stop) == file_record.sums[chunk_index]
            )
        except OSError as error:
            return error

    wrong_chunks: dict[str, list[int]] = {}
    with worker_pool("hasten-verify") as thread_pool:
        for (_, file_record, chunk_index), is_sound in zip(
            chunk_jobs, thread_pool.map(verify, chunk_jobs), strict=True
        ):
            if isinstance(is_sound, OSError):
                problems[file_record.name] = f"cannot be read: {is_sound}"
            elif not is_sound:
                wrong_chunks.setdefault(file_record.name, []).append(chunk_index)
            if progress is not None:
                progress(min(CHUNK_BYTES, file_record.size - chunk_index * CHUNK_BYTES))
    if problems or wrong_chunks:
        return _problem_lines(file_records, problems, wrong_chunks)
    return []


def _problem_lines(
    file_records: Sequence[FileRecord],
    problems: dict[str, str],
    wrong_chunks: Mapping[str, list[int]],
) -> list[str]:
    """Return one line per problem, in the order of the files; `bad` are the chunks with a wrong checksum."""
    for file_record in file_records:
        if file_record.name in wrong_chunks:
            problem = f"has a wrong checksum in chunks {wrong_chunks[file_record.name][:4]} of {len(file_record.sums)}"
            problems.setdefault(file_record.name, problem)
    return [
        f"{file_record.name} {problems[file_record.name]}"
        for file_record in file_records
        if file_record.name in problems
    ]


def _find_visible_problem(file_path: Path, file_record: FileRecord) -> str | None:
    """Return the problem of a file that is known without reading its content; None if there is none."""
    try:
        file_size = size_of(file_path)
    except FileNotFoundError:
        return "is missing"
    except UnsafeCheckpointError:
        return "is a pipe, a device or a folder instead of a file"
    except OSError as error:
        return f"cannot be read: {error}"
    if file_size == file_record.size:
        return None
    return (
        f"has {file_size} bytes instead of {file_record.size} (truncated or replaced)"
    )


def read_one_version(read: Callable[[], ResultType]) -> ResultType:
    """Return the result of `read`, which is called again if another save replaces the checkpoint meanwhile.

    Ranks: every rank, if `read` is collective.
    """
    for _ in range(MAX_READ_ATTEMPTS - 1):
        try:
            return read()
        except CheckpointReplacedError:
            continue
    return read()


@contextmanager
def open_checkpoint(
    store: CheckpointStore,
    checkpoint_name: str,
    comm: Comm,
    *,
    verify: bool = True,
    allow_pickle: bool = False,
) -> Iterator[Checkpoint]:
    """Context manager that provides a verified checkpoint.

    Ranks: every rank; the ranks divide the verification, and an error on one rank is raised on all.
    Raises: IncompleteCheckpointError, CorruptCheckpointError, UnsafeCheckpointError or CheckpointVersionError.
    """
    with ExitStack() as exit_stack:
        with agreeing(
            comm, f"reading the manifest of {checkpoint_name!r}"
        ) as agreement:
            manifest = store.manifest(checkpoint_name)
            agreement.share()
            agreement.label = f"fetching {checkpoint_name!r} from {store.address}"
            try:
                if store.remote and comm.size > 1:
                    folder = _download(
                        store, checkpoint_name, manifest, agreement, exit_stack
                    )
                else:
                    folder = exit_stack.enter_context(
                        store.fetch(checkpoint_name, manifest)
                    )
            except CheckpointError:
                Checkpoint(
                    checkpoint_name,
                    manifest,
                    Path(checkpoint_name),
                    is_current=lambda: store.is_current(checkpoint_name, manifest),
                ).check_current()
                raise
            checkpoint = Checkpoint(
                checkpoint_name,
                manifest,
                folder,
                allow_pickle,
                is_current=lambda: store.is_current(checkpoint_name, manifest, folder),
            )
            agreement.label = f"verifying {checkpoint_name!r}"
            if verify:
                checkpoint.verify(agreement)
        yield checkpoint


def _download(
    store: CheckpointStore,
    checkpoint_name: str,
    manifest: Manifest,
    agreement: Agreement,
    exit_stack: ExitStack,
) -> Path:
    """Return the folder to read from: the download of the machine's first rank, else a separate one.

    Mapped files stay readable after the rank that downloaded them has deleted them. Ranks: every rank.
    """
    own_host = platform.node()
    hosts: list[str] = agreement.share(own_host)
    own_folder = None
    if agreement.comm.rank == hosts.index(own_host):
        own_folder = exit_stack.enter_context(store.fetch(checkpoint_name, manifest))
    folders_of_ranks: list[str | None] = agreement.share(
        None if own_folder is None else str(own_folder)
    )
    if own_folder is not None:
        return own_folder
    host_folder = next(
        Path(rank_folder)
        for host, rank_folder in zip(hosts, folders_of_ranks, strict=True)
        if host == own_host and rank_folder is not None
    )
    if all((host_folder / file.name).exists() for file in manifest.files):
        return host_folder
    # same host name, but a different file system
    return exit_stack.enter_context(store.fetch(checkpoint_name, manifest))


def _share_of(file_records: Sequence[FileRecord], comm: Comm) -> Sequence[FileRecord]:
    """Return this rank's share of the files, balanced by bytes."""
    bytes_of_ranks = [0] * comm.size
    rank_share = []
    for file_record in sorted(
        file_records, key=lambda file_record: (-file_record.size, file_record.name)
    ):
        lightest_rank = bytes_of_ranks.index(min(bytes_of_ranks))
        bytes_of_ranks[lightest_rank] += file_record.size + 4096
        if lightest_rank == comm.rank:
            rank_share.append(file_record)
    return rank_share
