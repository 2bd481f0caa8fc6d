"""Collective save: every rank writes its files into a draft, all vote, the main rank of each disk commits."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import msgspec
from torch import Tensor

from hasten.checkpoint.base import Blob, CheckpointInfo, CheckpointStore, Component, Draft, StateTree, local_data
from hasten.checkpoint.format.formats import SUFFIX, encode_safetensors, encode_with_sidecar
from hasten.checkpoint.format.layout import FilePlan, Sizes, check_names, hub_index, plan_component
from hasten.checkpoint.format.manifest import ComponentRecord, FileRecord, Manifest
from hasten.checkpoint.store.retention import Kept, Retention, expired
from hasten.comm.agreement import Agreement, agreeing
from hasten.comm.base import Comm
from hasten.errors import CheckpointBusyError, CheckpointError, MismatchError

log = logging.getLogger(__name__)


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
    begun: list[Draft] = []
    try:
        with agreeing(comm, f"starting the checkpoint {name!r}") as together:
            if comm.rank == 0:
                begun.append(store.begin(name))
            return _joined(store, name, begun, together, node, each_node)
    except BaseException:
        for draft in begun:
            discard(draft)
        raise


def _joined(
    store: CheckpointStore, name: str, begun: list[Draft], together: Agreement, node: int, each_node: bool
) -> DiskGroup:
    comm = together.comm
    token = together.share(begun[0].token if begun else None)[0]
    joined = begun[0] if begun else store.join(name, token)
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
    if rank == members[0] and not begun:
        begun.append(store.begin(name))
    tokens = together.share(begun[0].token if begun else None)
    mine = begun[0] if begun else store.join(name, tokens[comm.ranks.index(members[0])])
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
    sizes: Sizes | None = None,
    announce: Callable[[Sequence[Tensor]], None] = lambda tensors: None,
) -> PreparedSave:
    """Plan this rank's files and compute their layout; no byte is copied yet.

    `announce` is called with the tensors this rank will write before the layout, so that copies run concurrently.
    Ranks: every rank. Raises: MismatchError when ranks do not save the same components.
    """
    rank = comm.ranks[comm.rank]
    blobs: dict[str, Blob] = {}
    owners: dict[str, FilePlan | None] = {}
    with group.discarding(rank), agreeing(comm, "preparing the checkpoint") as together:
        _compare(tree, together)
        plans: list[FilePlan] = []
        for name, component in tree.components.items():
            files = plan_component(name, component, rank, group.ranks, sizes)
            plans += files
            whole = len(files) > 1 and component.kind == "model" and group.is_main(rank)
            if whole:
                stem, _, end = files[0].name.partition("-00001-of-")
                index = f"{stem}.{end.partition('.')[2]}.index.json"
                raw = json.dumps(hub_index(files, component), indent=1, sort_keys=True).encode()
                blobs[index], owners[index] = Blob([raw], len(raw)), None
        mine = {file: plan for file, plan in check_names(plans).items() if plan.writer == rank}
        announce([local_data(tree.components[p.component].tensors[key]) for p in mine.values() for key in p.keys])
        for file, plan in mine.items():
            blobs[file], sidecar = encode(tree.components[plan.component], plan)
            owners[file] = plan
            if sidecar is not None:
                blobs[file + SUFFIX], owners[file + SUFFIX] = sidecar, None
        records = {
            name: ComponentRecord(kind=c.kind, format=c.format, per_rank=c.per_rank)
            for name, c in tree.components.items()
        }
        return PreparedSave(blobs, owners, records)


def encode(component: Component, plan: FilePlan) -> tuple[Blob, Blob | None]:
    """Return the bytes of one planned file, and those of its sidecar, if any."""
    tensors = {key: component.tensors[key] for key in plan.keys}
    data = component.data if plan.with_data else None
    if plan.format == "torch":
        return encode_with_sidecar(tensors, data)
    return encode_safetensors(tensors, data), None


def _compare(tree: StateTree, together: Agreement) -> None:
    """Raise MismatchError unless ranks save the same components, and whole components hold the same tensors."""
    comm = together.comm
    if comm.size == 1:
        return
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
    after: Callable[[], Sequence[str]] = lambda: (),
) -> SaveOutcome:
    """Write this rank's files, vote, commit, then run `after` (retention) on each disk's main rank.

    Ranks: every rank. Safe on a background thread when `comm` is a separate group.
    Raises: CheckpointError on every rank if one failed; earlier checkpoints are unchanged.
    """
    rank = comm.ranks[comm.rank]
    name = group.draft.name
    manifest = header
    deleted: tuple[str, ...] = ()
    with group.discarding(rank), agreeing(comm, f"writing the checkpoint {name!r}") as together:
        records: list[list[FileRecord]] = together.share(_put(prepared, group.draft, rank))
        together.label = f"committing the checkpoint {name!r}"
        if group.is_main(rank):
            manifest = _manifest(header, prepared, group, comm, records)
            group.draft.commit(manifest)
            group.done = True
        together.share()  # retention deletes nothing before every disk has the new checkpoint
        if group.is_main(rank):
            deleted = _clean(after, name)
        return SaveOutcome(CheckpointInfo(name, manifest), deleted)


def _put(prepared: PreparedSave, draft: Draft, rank: int) -> list[FileRecord]:
    written = draft.put(prepared.blobs)
    records = []
    for file, record in written.items():
        plan = prepared.owners.get(file)  # None for files of hooks
        owner = plan.component if plan is not None else None
        records.append(msgspec.structs.replace(record, component=owner, rank=rank if owner is not None else None))
    return records


def _manifest(
    header: Manifest, prepared: PreparedSave, group: DiskGroup, comm: Comm, gathered: Sequence[Sequence[FileRecord]]
) -> Manifest:
    files = [record for i, records in enumerate(gathered) if comm.ranks[i] in group.ranks for record in records]
    files = _once([*files, *group.draft.adopt([file.name for file in files])])
    return msgspec.structs.replace(
        header,
        world_size=comm.size,
        ranks=group.ranks,
        components=prepared.components,
        files=tuple(sorted(files, key=lambda file: file.name)),
    )


def _once(files: Sequence[FileRecord]) -> list[FileRecord]:
    """Merge the records of identical files that hooks wrote on several ranks; raise CheckpointError if they differ."""
    found: dict[str, FileRecord] = {}
    for file in files:
        if found.setdefault(file.name, file) != file:
            raise CheckpointError(
                f"save hooks wrote {file.name} on several ranks with different content, and only one can be stored. Nothing "
                "was saved. Let the main process alone write it, or give every rank's file another name."
            )
    return list(found.values())


def _clean(after: Callable[[], Sequence[str]], name: str) -> tuple[str, ...]:
    try:
        return tuple(after())
    except (OSError, CheckpointError) as error:  # the new checkpoint is safe; deletion is retried after the next save
        log.warning("after saving %s, old checkpoints could not be deleted: %s", name, error)
        return ()


def retire_expired(store: CheckpointStore, policy: Retention, numbers: Callable[[str], int | None]) -> list[str]:
    """Delete checkpoints that the policy expires and return their names. Ranks: each disk's main, after the commit."""
    kept = []
    for name in store.names():
        number = numbers(name)
        if number is not None and store.complete(name):
            kept.append(Kept(name, number, store.manifest(name).metrics))
    deleted = []
    for name in expired(kept, policy):
        try:
            store.delete(name)
        except CheckpointBusyError as error:  # another run is saving to it
            log.warning("%s is not deleted: %s", name, error)
        else:
            deleted.append(name)
    return deleted
