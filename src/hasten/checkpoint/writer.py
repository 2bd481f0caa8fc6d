"""Collective save: components become files, every rank writes its files into a draft, the ranks vote, one commits."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import msgspec
from torch import Tensor

from hasten.checkpoint.base import (
    Blob,
    CheckpointInfo,
    CheckpointStore,
    Component,
    Draft,
    Format,
    Slice,
    StateTree,
    local_data,
    num_bytes,
)
from hasten.checkpoint.format.formats import SUFFIX, encode_safetensors, encode_with_sidecar, tied
from hasten.checkpoint.format.manifest import ComponentRecord, FileRecord, Manifest
from hasten.checkpoint.store.retention import CommittedCheckpoint, Retention, expired
from hasten.comm.agreement import Agreement, agreeing
from hasten.comm.base import Comm
from hasten.errors import CheckpointBusyError, CheckpointError, MismatchError

log = logging.getLogger(__name__)

SINGLE_FILE_BYTES = 2 * 1024**3
"""A component up to this size is written as one file under its usual name."""
SHARD_BYTES = 1024**3
"""A larger component is split into files of this size, which are written in parallel."""


# -- layout: which tensor goes to which file, which rank writes it ------------------------------------------------------
@dataclass(frozen=True, slots=True)
class FilePlan:
    """One file of a component: its name, the rank that writes it, its tensors, and whether it holds the JSON."""

    name: str
    component: str
    writer: int
    keys: tuple[str, ...]
    format: Format
    with_data: bool


@dataclass(frozen=True, slots=True)
class FileLayout:
    """Size limits above which a component is split into several files, and the components in hidden files."""

    single: int = SINGLE_FILE_BYTES
    shard: int = SHARD_BYTES
    hidden: frozenset[str] = frozenset()
    """Kinds of components whose files have names that start with a dot."""
    torch_model: str = "pytorch_model"
    """Name of the weights in torch's format, before the model's number."""


def plan_component(
    name: str, component: Component, rank: int, ranks: Sequence[int], layout: FileLayout | None = None
) -> list[FilePlan]:
    """Return the files of one component, as this rank sees them; `ranks` share one disk, the first of them is its main.

    For whole components the result is the same on every rank; for per-rank and sliced ones it lists this rank's file.
    """
    kind, fmt, limits = component.kind, component.format, layout or FileLayout()
    stem = limits.torch_model + name.removeprefix("model") if kind == "model" and fmt == "torch" else name
    if kind in limits.hidden:
        stem = f".{stem}"
    end = ".safetensors" if fmt == "safetensors" else ".pt" if kind == "scaler" else ".bin"
    if component.per_rank:
        # a number after the name of a scheduler or object is its index: scheduler_1 is the second scheduler
        which = f"rank_{rank}" if kind in ("scheduler", "object") else str(rank)
        return [FilePlan(f"{stem}_{which}{end}", name, rank, tuple(component.tensors), fmt, True)]
    if component.sliced:
        return _plan_slices(name, component, rank, ranks)
    if component.num_bytes <= limits.single:
        return [FilePlan(stem + end, name, ranks[0], tuple(component.tensors), fmt, True)]
    if component.data is not None and fmt == "torch":  # nested state cannot be split; flat tensors can
        fmt, end = "safetensors", ".safetensors"
    shards = cut(component, limits.shard)
    return [
        FilePlan(
            f"{stem}-{i + 1:05d}-of-{len(shards):05d}{end}",
            name,
            ranks[0] if i == 0 else ranks[i % len(ranks)],
            keys,
            fmt,
            i == 0,
        )
        for i, keys in enumerate(shards)
    ]


def _plan_slices(name: str, component: Component, rank: int, ranks: Sequence[int]) -> list[FilePlan]:
    main = rank == ranks[0]
    keys = tuple(k for k, v in component.tensors.items() if (v.owned if isinstance(v, Slice) else main))
    if not keys and not main:
        return []
    return [FilePlan(f"{name}_shard_{rank:05d}.safetensors", name, rank, keys, "safetensors", main)]


def cut(component: Component, limit: int) -> list[tuple[str, ...]]:
    """Split the keys into files of at most `limit` bytes (a larger tensor fills one file); main-only keys come first.

    Without main-only keys, files are filled as the Hub's tools fill them: on both sides of a tensor that has a file of
    its own. Names that share memory stay together, so that the tensor is stored once.
    """
    owners = tied(component.tensors)
    names: dict[str, list[str]] = {}
    for key in component.tensors:
        names.setdefault(owners.get(key, key), []).append(key)
    shards: list[tuple[str, ...]] = []
    current: list[str] = []
    used = 0
    for own in sorted(names, key=lambda key: key not in component.main_only):
        size = num_bytes(component.tensors[own])
        if size > limit and not component.main_only:
            shards.append(tuple(names[own]))
            continue
        held_by_main = not shards and own in component.main_only
        if current and used + size > limit and not held_by_main:
            shards.append(tuple(current))
            current, used = [], 0
        current += names[own]
        used += size
    return [*shards, tuple(current)] if current or not shards else shards


def hub_index(plans: Sequence[FilePlan], component: Component) -> dict[str, object]:
    """Return the index that Hub tools read next to sharded weight files."""
    return {
        "metadata": {"total_size": component.num_bytes},
        "weight_map": {key: plan.name for plan in plans for key in plan.keys},
    }


# -- saving -----------------------------------------------------------------------------------------------------------
@dataclass(slots=True)
class DiskGroup:
    """Ranks that share a folder; the first of them commits."""

    ranks: tuple[int, ...]
    draft: Draft
    done: bool = False
    """True after the draft was committed or discarded."""

    def is_main(self, rank: int) -> bool:
        """Return True if this rank commits for the group."""
        return rank == self.ranks[0]

    @contextmanager
    def discarding(self, rank: int) -> Iterator[None]:
        """Context manager in which the group's main discards the draft if the block fails before the commit."""
        try:
            yield
        except BaseException:
            if self.is_main(rank) and not self.done:
                self.done = True
                discard(self.draft)
            raise


def discard(draft: Draft) -> None:
    """Remove a draft; if that fails, the next save removes it."""
    try:
        draft.abort()
    except OSError as error:
        log.warning("the draft of %s could not be removed now: %s", draft.name, error)


def start(store: CheckpointStore, comm: Comm, name: str, *, node: int = 0, each_node: bool = False) -> DiskGroup:
    """Start a draft on every disk: one if all ranks share it, else one per machine.

    Ranks: every rank. `node` is the index of this rank's machine.
    Raises: CheckpointError when machines do not share the folder and `each_node` is False.
    """
    if comm.size == 1:
        return DiskGroup(comm.ranks, store.begin(name))
    started: list[Draft] = []
    try:
        with agreeing(comm, f"starting the checkpoint {name!r}") as together:
            if comm.rank == 0:
                started.append(store.begin(name))
            return _join(store, name, started, together, node, each_node)
    except BaseException:
        for draft in started:
            discard(draft)
        raise


def _join(
    store: CheckpointStore, name: str, started: list[Draft], together: Agreement, node: int, each_node: bool
) -> DiskGroup:
    comm = together.comm
    token = together.share(started[0].token if started else None)[0]
    joined = started[0] if started else store.join(name, token)
    seen: list[tuple[int, bool]] = together.share((node, joined is not None))
    if all(sees for _, sees in seen):
        assert joined is not None, "every rank sees the draft"
        return DiskGroup(comm.ranks, joined)
    blind = [comm.ranks[i] for i, (_, sees) in enumerate(seen) if not sees]
    if not each_node:
        raise CheckpointError(
            f"ranks {blind} do not see {store.address} as rank {comm.ranks[0]} does, so their files would be missing. "
            "Nothing was saved. Use a folder that all machines share, or set save_on_each_node=True in "
            "ProjectConfiguration."
        )
    together.label = f"starting the checkpoint {name!r} on machine {node}"
    members = tuple(comm.ranks[i] for i, (other, _) in enumerate(seen) if other == node)
    rank = comm.ranks[comm.rank]
    if rank == members[0] and not started:
        started.append(store.begin(name))
    tokens = together.share(started[0].token if started else None)
    mine = started[0] if started else store.join(name, tokens[comm.ranks.index(members[0])])
    if mine is None:
        raise CheckpointError(
            f"rank {rank} does not see {store.address} of its machine {node}, so its files would be missing. Nothing was "
            "saved. Use a folder that all processes of a machine share."
        )
    return DiskGroup(members, mine)


@dataclass(frozen=True, slots=True)
class PreparedSave:
    """Files that this rank will write: contents by file name, and the component records for the manifest."""

    blobs: dict[str, Blob]
    owners: dict[str, FilePlan | None]
    components: dict[str, ComponentRecord]


def prepare(
    tree: StateTree,
    group: DiskGroup,
    comm: Comm,
    layout: FileLayout | None = None,
    announce: Callable[[Sequence[Tensor]], None] | None = None,
) -> PreparedSave:
    """Plan this rank's files and compute their layout; no byte is copied yet.

    `announce` is called with the tensors this rank will write before the layout, so that copies run concurrently.
    Ranks: every rank. Raises: MismatchError when ranks do not save the same components.
    """
    rank = comm.ranks[comm.rank]
    save = PreparedSave({}, {}, {})
    with group.discarding(rank), agreeing(comm, "preparing the checkpoint") as together:
        if comm.size > 1:
            _compare(tree, together)
        planned: dict[str, FilePlan] = {}
        for name, component in tree.components.items():
            files = plan_component(name, component, rank, group.ranks, layout)
            save.components[name] = ComponentRecord(
                kind=component.kind, format=component.format, per_rank=component.per_rank
            )
            if len(files) > 1 and component.kind == "model" and rank == group.ranks[0]:
                stem, _, end = files[0].name.partition("-00001-of-")
                raw = json.dumps(hub_index(files, component), indent=1, sort_keys=True).encode()
                index = f"{stem}.{end.partition('.')[2]}.index.json"
                save.blobs[index], save.owners[index] = Blob([raw], len(raw)), None
            for plan in files:
                assert plan.name not in planned, f"{plan.name} belongs to {name} and {planned[plan.name].component}"
                planned[plan.name] = plan
        mine = dict(planned)
        for file, plan in planned.items():
            if plan.writer != rank:
                del mine[file]
        if announce is not None:
            announce([local_data(tree.components[p.component].tensors[key]) for p in mine.values() for key in p.keys])
        for file, plan in mine.items():
            save.blobs[file], sidecar = encode(tree.components[plan.component], plan)
            save.owners[file] = plan
            if sidecar is not None:
                save.blobs[file + SUFFIX], save.owners[file + SUFFIX] = sidecar, None
        return save


def encode(component: Component, plan: FilePlan) -> tuple[Blob, Blob | None]:
    """Return the bytes of one planned file, and those of its sidecar, if any."""
    tensors = dict(zip(plan.keys, map(component.tensors.__getitem__, plan.keys), strict=True))
    data = component.data if plan.with_data else None
    if plan.format == "torch":
        return encode_with_sidecar(tensors, data)
    return encode_safetensors(tensors, data), None


def _compare(tree: StateTree, together: Agreement) -> None:
    """Raise MismatchError unless ranks save the same components, and whole components hold the same tensors."""
    comm = together.comm
    described: list[Any] = []
    for name, c in tree.components.items():
        shapes = [] if c.per_rank or c.sliced else sorted((k, str(v.shape)) for k, v in c.tensors.items())
        described.append((name, c.kind, c.per_rank, c.sliced, shapes))
    digest = hashlib.sha256(json.dumps(described).encode()).hexdigest()
    views = together.share((digest, sorted(tree.components)))
    if len({digest for digest, _ in views}) > 1:
        listed = "; ".join(f"rank {comm.ranks[i]}: {names}" for i, (_, names) in enumerate(views))
        raise MismatchError(
            f"ranks do not save the same state ({listed}, or other shapes under these names), so the checkpoint would "
            "be inconsistent. Prepare and register the same objects on every rank."
        )


@dataclass(frozen=True, slots=True)
class SaveOutcome:
    """Result of a finished save: the checkpoint, and the names of those that retention deleted."""

    info: CheckpointInfo
    deleted: tuple[str, ...] = ()


def finish(
    prepared: PreparedSave,
    group: DiskGroup,
    comm: Comm,
    header: Manifest,
    after: Callable[[], Sequence[str]] | None = None,
) -> SaveOutcome:
    """Write this rank's files, vote, commit, then run `after` (retention) on each disk's main rank.

    Ranks: every rank. Safe on a background thread when `comm` is a separate group.
    Raises: CheckpointError on every rank if one failed; earlier checkpoints are unchanged.
    """
    rank, draft = comm.ranks[comm.rank], group.draft
    is_main, manifest = rank == group.ranks[0], header
    deleted: tuple[str, ...] = ()
    with group.discarding(rank), agreeing(comm, f"writing the checkpoint {draft.name!r}") as together:
        written = []
        for file, record in draft.put(prepared.blobs).items():
            plan = prepared.owners.get(file)  # None for sidecars, indexes and files of hooks
            owner = (None, None) if plan is None else (plan.component, rank)
            written.append(msgspec.structs.replace(record, component=owner[0], rank=owner[1]))
        records: list[list[FileRecord]] = together.share(written)
        together.label = f"committing the checkpoint {draft.name!r}"
        if is_main:
            manifest = _manifest(header, prepared, group, comm, records)
            draft.commit(manifest)
            group.done = True
        together.share()  # retention deletes nothing before every disk has the new checkpoint
        if is_main and after is not None:
            try:
                deleted = tuple(after())
            except (OSError, CheckpointError) as error:  # the checkpoint is safe; the next save deletes again
                log.warning("after saving %s, old checkpoints could not be deleted: %s", draft.name, error)
        return SaveOutcome(CheckpointInfo(draft.name, manifest), deleted)


def _manifest(
    header: Manifest, prepared: PreparedSave, group: DiskGroup, comm: Comm, written: Sequence[Sequence[FileRecord]]
) -> Manifest:
    """Return the manifest of all files on this disk: those of its ranks, and those that save hooks created."""
    files: dict[str, FileRecord] = {}
    for rank, records in zip(comm.ranks, written, strict=True):
        for file in records if rank in group.ranks else ():
            if files.setdefault(file.name, file) != file:
                raise CheckpointError(
                    f"save hooks wrote {file.name} on several ranks with different content, and only one can be stored. "
                    "Nothing was saved. Let the main process alone write it, or give every rank's file another name."
                )
    for file in group.draft.hook_files(list(files)):
        files[file.name] = file
    return msgspec.structs.replace(
        header,
        world_size=comm.size,
        ranks=group.ranks,
        components=prepared.components,
        files=tuple(sorted(files.values(), key=attrgetter("name"))),
    )


def retire_expired(store: CheckpointStore, policy: Retention, numbers: Callable[[str], int | None]) -> list[str]:
    """Delete checkpoints that the policy expires and return their names. Ranks: each disk's main, after the commit."""
    kept = []
    for name in store.names():
        number = numbers(name)
        if number is not None and store.complete(name):
            kept.append(CommittedCheckpoint(name, number, store.manifest(name).metrics))
    deleted = []
    for name in expired(kept, policy):
        try:
            store.delete(name)
        except CheckpointBusyError as error:  # another run is saving to it
            log.warning("%s is not deleted: %s", name, error)
        else:
            deleted.append(name)
    return deleted
