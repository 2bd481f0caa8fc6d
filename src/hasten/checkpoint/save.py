"""One save, read from top to bottom: a draft on every disk, the layout of its files, this rank's files, the vote, and the commit."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from operator import attrgetter
from types import TracebackType
from typing import Any

import msgspec
from torch import Tensor

from hasten.checkpoint.base import (
    Blob,
    CheckpointStore,
    Component,
    Draft,
    Format,
    Slice,
    StateTree,
    local_data,
)
from hasten.checkpoint.format.formats import (
    encode_safetensors,
    encode_torch,
    find_tied_names,
)
from hasten.checkpoint.format.manifest import ComponentRecord, FileRecord, Manifest
from hasten.comm.agreement import Agreement, agreeing
from hasten.comm.base import Comm
from hasten.errors import CheckpointError, MismatchError

log = logging.getLogger(__name__)

SINGLE_FILE_BYTES = 2 * 1024**3
"""A component up to this size is written as one file under its usual name."""
SHARD_BYTES = 1024**3
"""A larger component is split into files of this size, which are written in parallel."""


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


class Save(AbstractContextManager["Save"]):
    """A save from its draft to the committed checkpoint; leaving its context with an error discards the draft.

    Ranks: every rank calls `start`, `plan` and `write`, in this order, inside one or two `agreeing` blocks.
    """

    draft: Draft
    """The draft that this rank writes into, from `start` on."""
    location: str
    """Path or URL of the checkpoint, from `start` on."""

    def __init__(
        self, store: CheckpointStore, comm: Comm, layout: FileLayout | None = None
    ) -> None:
        self.store = store
        self.blobs: dict[str, Blob] = {}
        """Contents of the files that this rank writes, by name."""
        self.ranks = comm.ranks
        """Ranks that share the folder; the first of them commits."""
        self.is_main = comm.rank == 0
        """True if this rank commits for those that share its folder."""
        self._rank = comm.ranks[comm.rank]
        self._layout = layout
        self._created_draft: Draft | None = None
        """The draft that this rank removes if the save fails."""
        self._components: dict[str, ComponentRecord] = {}
        self._component_of: dict[str, str] = {}

    def __exit__(
        self,
        error_class: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None or self._created_draft is None:
            return
        draft = self._created_draft
        self._created_draft = None
        try:
            draft.abort()
        except OSError as abort_error:  # the next save removes it
            log.warning(
                "the draft of %s could not be removed now: %s", draft.name, abort_error
            )

    # -- the draft --------------------------------------------------------------------------------------------------
    def start(
        self,
        agreement: Agreement,
        checkpoint_name: str | None,
        at_least: int = 0,
        *,
        node: int = 0,
        each_node: bool = False,
    ) -> None:
        """Start a draft on every disk: one if all ranks share it, else one per machine.

        Without a name, the checkpoint gets the next free number from `at_least` on. `node` is the index of this rank's machine.
        Raises: CheckpointError when machines do not share the folder and `each_node` is False.
        """
        store = self.store
        comm = agreement.comm
        agreement.label = f"starting a checkpoint in {store.address}"
        if comm.rank == 0:
            if checkpoint_name is None:
                self.draft = store.begin_numbered(at_least)
            else:
                self.draft = store.begin(checkpoint_name)
            self._created_draft = self.draft
            checkpoint_name = self.draft.name
        if comm.size > 1:
            self._join_draft(checkpoint_name, agreement, node, each_node)
        self.location = f"{store.address.rstrip('/')}/{self.draft.name}"

    def _join_draft(
        self,
        checkpoint_name: str | None,
        agreement: Agreement,
        node: int,
        each_node: bool,
    ) -> None:
        """Join the draft of rank 0, or start one for this machine, if it does not see that of rank 0."""
        store = self.store
        comm = agreement.comm
        draft = self._created_draft
        draft_token = None if draft is None else draft.token
        checkpoint_name, draft_token = agreement.share((checkpoint_name, draft_token))[
            0
        ]
        if draft is None:
            draft = store.join(checkpoint_name, draft_token)
        views_of_ranks: list[tuple[int, bool]] = agreement.share(
            (node, draft is not None)
        )
        blind_ranks = []
        machine_ranks = []
        for rank, (other_node, sees_draft) in zip(
            comm.ranks, views_of_ranks, strict=True
        ):
            if not sees_draft:
                blind_ranks.append(rank)
            if other_node == node:
                machine_ranks.append(rank)
        if blind_ranks and not each_node:
            raise CheckpointError(
                f"ranks {blind_ranks} do not see {store.address} as rank {comm.ranks[0]} does, so their files would be missing. "
                "Nothing was saved. Use a folder that all machines share, or set save_on_each_node=True in "
                "ProjectConfiguration."
            )
        if blind_ranks:
            self.ranks = tuple(machine_ranks)
            self.is_main = self._rank == self.ranks[0]
            if self.is_main and comm.rank != 0:
                draft = self._created_draft = store.begin(checkpoint_name)
            tokens_of_ranks = agreement.share(
                draft.token if self.is_main and draft is not None else None
            )
            if not self.is_main:
                machine_token = tokens_of_ranks[comm.ranks.index(self.ranks[0])]
                draft = store.join(checkpoint_name, machine_token)
        if draft is None:
            raise CheckpointError(
                f"rank {self._rank} does not see {store.address} of its machine {node}, so its files would be missing. Nothing was "
                "saved. Use a folder that all processes of a machine share."
            )
        self.draft = draft

    # -- this rank's files ------------------------------------------------------------------------------------------
    def plan(
        self,
        tree: StateTree,
        agreement: Agreement,
        announce: Callable[[Sequence[Tensor]], None] | None = None,
    ) -> None:
        """Plan this rank's files and compute their layout; no byte is copied yet.

        `announce` is called with the tensors this rank will write before the layout, so that copies run concurrently.
        Raises: MismatchError when ranks do not save the same components.
        """
        agreement.label = f"preparing the checkpoint {self.draft.name!r}"
        if agreement.comm.size > 1:
            _check_same_components(tree, agreement)
        own_plans: list[FilePlan] = []
        for component_name, component in tree.components.items():
            file_plans = plan_component(
                component_name, component, self._rank, self.ranks, self._layout
            )
            self._components[component_name] = ComponentRecord(
                kind=component.kind, per_rank=component.per_rank
            )
            if len(file_plans) > 1 and component.kind == "model" and self.is_main:
                stem, _, suffix = file_plans[0].name.partition("-00001-of-")
                index_name = f"{stem}.{suffix.partition('.')[2]}.index.json"
                self.blobs[index_name] = hub_index(file_plans, component)
            for file_plan in file_plans:
                if file_plan.writer == self._rank:
                    own_plans.append(file_plan)
        if announce is not None:
            written_tensors = []
            for file_plan in own_plans:
                component_tensors = tree.components[file_plan.component].tensors
                for tensor_name in file_plan.keys:
                    tensor = component_tensors[tensor_name]
                    written_tensors.append(
                        tensor.data if isinstance(tensor, Slice) else tensor
                    )
            announce(written_tensors)
        for file_plan in own_plans:
            assert file_plan.name not in self.blobs, (
                f"{file_plan.name} belongs to {file_plan.component} and {self._component_of[file_plan.name]}"
            )
            component = tree.components[file_plan.component]
            self.blobs[file_plan.name] = encode_file(component, file_plan)
            self._component_of[file_plan.name] = file_plan.component

    # -- writing ----------------------------------------------------------------------------------------------------
    def write(self, manifest_header: Manifest, agreement: Agreement) -> Manifest:
        """Write this rank's files, vote and commit; return the manifest on the main ranks, elsewhere the header.

        Safe on a background thread when `together` is of a separate group.
        Raises: CheckpointError on every rank if one failed; earlier checkpoints are unchanged.
        """
        agreement.label = f"writing the checkpoint {self.draft.name!r}"
        own_records = []
        for file_name, file_record in self.draft.put(self.blobs).items():
            # None for indexes and files of hooks
            component_name = self._component_of.get(file_name)
            rank = None if component_name is None else self._rank
            own_records.append(
                msgspec.structs.replace(
                    file_record, component=component_name, rank=rank
                )
            )
        records_of_ranks: list[list[FileRecord]] = agreement.share(own_records)
        agreement.label = f"committing the checkpoint {self.draft.name!r}"
        manifest = manifest_header
        if self.is_main:
            file_records: dict[str, FileRecord] = {}
            for rank, rank_records in zip(
                agreement.comm.ranks, records_of_ranks, strict=True
            ):
                for record in rank_records if rank in self.ranks else ():
                    if file_records.setdefault(record.name, record) != record:
                        raise CheckpointError(
                            f"save hooks wrote {record.name} on several ranks with different content, and only one can be stored. "
                            "Nothing was saved. Let the main process alone write it, or give every rank's file another name."
                        )
            for hook_file in self.draft.hook_files(list(file_records)):
                file_records[hook_file.name] = hook_file
            manifest = msgspec.structs.replace(
                manifest_header,
                world_size=agreement.comm.size,
                ranks=self.ranks,
                components=self._components,
                files=tuple(sorted(file_records.values(), key=attrgetter("name"))),
            )
            self.draft.commit(manifest)
            self._created_draft = None
        agreement.share()  # every disk has the new checkpoint
        return manifest


def _check_same_components(tree: StateTree, agreement: Agreement) -> None:
    """Raise MismatchError unless ranks save the same components, and whole components hold the same tensors."""
    comm = agreement.comm
    descriptions: list[Any] = []
    for component_name, component in tree.components.items():
        if component.per_rank or component.sliced:
            tensor_shapes = []
        else:
            tensor_shapes = sorted(
                (tensor_name, str(tensor.shape))
                for tensor_name, tensor in component.tensors.items()
            )
        descriptions.append(
            (
                component_name,
                component.kind,
                component.per_rank,
                component.sliced,
                tensor_shapes,
            )
        )
    digest = hashlib.sha256(json.dumps(descriptions).encode()).hexdigest()
    views_of_ranks = agreement.share((digest, sorted(tree.components)))
    if len({digest for digest, _ in views_of_ranks}) > 1:
        rank_descriptions = "; ".join(
            f"rank {comm.ranks[index]}: {component_names}"
            for index, (_, component_names) in enumerate(views_of_ranks)
        )
        raise MismatchError(
            f"ranks do not save the same state ({rank_descriptions}, or other shapes under these names), so the checkpoint would "
            "be inconsistent. Prepare and register the same objects on every rank."
        )


def save_tree(
    store: CheckpointStore,
    checkpoint_name: str,
    tree: StateTree,
    manifest_header: Manifest,
    comm: Comm,
    node: int = 0,
) -> Manifest:
    """Save a tree as one checkpoint. Ranks: every rank."""
    with (
        agreeing(comm, f"saving {checkpoint_name!r}") as agreement,
        Save(store, comm) as save,
    ):
        save.start(agreement, checkpoint_name, node=node)
        save.plan(tree, agreement)
        return save.write(manifest_header, agreement)


# -- layout -------------------------------------------------------------------------------------------------------
def plan_component(
    component_name: str,
    component: Component,
    rank: int,
    ranks: Sequence[int],
    layout: FileLayout | None = None,
) -> list[FilePlan]:
    """Return the files of one component, as this rank sees them; `ranks` share one disk, the first of them is its main.

    For whole components the result is the same on every rank; for per-rank and sliced ones it lists this rank's file.
    """
    kind = component.kind
    file_format = component.format
    limits = layout or FileLayout()
    if kind == "model" and file_format == "torch":
        stem = limits.torch_model + component_name.removeprefix("model")
    else:
        stem = component_name
    if kind in limits.hidden:
        stem = f".{stem}"
    if file_format == "safetensors":
        suffix = ".safetensors"
    elif kind == "scaler":
        suffix = ".pt"
    else:
        suffix = ".bin"
    if component.per_rank:
        # a number after the name of an object is its index
        rank_label = f"rank_{rank}" if kind == "object" else str(rank)
        return [
            FilePlan(
                f"{stem}_{rank_label}{suffix}",
                component_name,
                rank,
                tuple(component.tensors),
                file_format,
                True,
            )
        ]
    total_bytes = 0
    for tensor in component.tensors.values():
        if isinstance(tensor, Slice):
            return _plan_slices(component_name, component, rank, ranks)
        total_bytes += tensor.nbytes
    if total_bytes <= limits.single:
        return [
            FilePlan(
                stem + suffix,
                component_name,
                ranks[0],
                tuple(component.tensors),
                file_format,
                True,
            )
        ]
    # nested state cannot be split; flat tensors can
    if component.data is not None and file_format == "torch":
        file_format = "safetensors"
        suffix = ".safetensors"
    shard_keys = split_into_shards(component, limits.shard)
    return [
        FilePlan(
            f"{stem}-{shard_index + 1:05d}-of-{len(shard_keys):05d}{suffix}",
            component_name,
            ranks[0] if shard_index == 0 else ranks[shard_index % len(ranks)],
            tensor_names,
            file_format,
            shard_index == 0,
        )
        for shard_index, tensor_names in enumerate(shard_keys)
    ]


def _plan_slices(
    component_name: str, component: Component, rank: int, ranks: Sequence[int]
) -> list[FilePlan]:
    is_main = rank == ranks[0]
    tensor_names = tuple(
        tensor_name
        for tensor_name, tensor in component.tensors.items()
        if (tensor.owned if isinstance(tensor, Slice) else is_main)
    )
    if not tensor_names and not is_main:
        return []
    return [
        FilePlan(
            f"{component_name}_shard_{rank:05d}.safetensors",
            component_name,
            rank,
            tensor_names,
            "safetensors",
            is_main,
        )
    ]


def split_into_shards(component: Component, max_bytes: int) -> list[tuple[str, ...]]:
    """Split the keys into files of at most `limit` bytes (a larger tensor fills one file); main-only keys come first.

    Without main-only keys, files are filled as the Hub's tools fill them: on both sides of a tensor that has a file of
    its own. Names that share memory stay together, so that the tensor is stored once.
    """
    first_names = find_tied_names(component.tensors)
    aliases_by_name: dict[str, list[str]] = {}
    for tensor_name in component.tensors:
        aliases_by_name.setdefault(
            first_names.get(tensor_name, tensor_name), []
        ).append(tensor_name)
    shard_keys: list[tuple[str, ...]] = []
    current_shard: list[str] = []
    used_bytes = 0
    for first_name in sorted(
        aliases_by_name, key=lambda tensor_name: tensor_name not in component.main_only
    ):
        first_tensor = component.tensors[first_name]
        assert isinstance(first_tensor, Tensor), "sliced components have other files"
        tensor_bytes = first_tensor.nbytes
        if tensor_bytes > max_bytes and not component.main_only:
            shard_keys.append(tuple(aliases_by_name[first_name]))
            continue
        held_by_main = not shard_keys and first_name in component.main_only
        if current_shard and used_bytes + tensor_bytes > max_bytes and not held_by_main:
            shard_keys.append(tuple(current_shard))
            current_shard = []
            used_bytes = 0
        current_shard += aliases_by_name[first_name]
        used_bytes += tensor_bytes
    if current_shard or not shard_keys:
        return [*shard_keys, tuple(current_shard)]
    return shard_keys


def hub_index(file_plans: Sequence[FilePlan], component: Component) -> Blob:
    """Return the index that Hub tools read next to sharded weight files."""
    weight_map = {
        tensor_name: file_plan.name
        for file_plan in file_plans
        for tensor_name in file_plan.keys
    }
    total_bytes = 0
    for tensor in component.tensors.values():
        total_bytes += local_data(tensor).nbytes
    index_table = {
        "metadata": {"total_size": total_bytes},
        "weight_map": weight_map,
    }
    raw_index = json.dumps(index_table, indent=2, sort_keys=True).encode() + b"\n"
    return Blob([raw_index], len(raw_index))


def encode_file(component: Component, file_plan: FilePlan) -> Blob:
    """Return the bytes of one planned file."""
    tensors = {}
    for tensor_name in file_plan.keys:
        tensors[tensor_name] = component.tensors[tensor_name]
    packed_state = component.data if file_plan.with_data else None
    if file_plan.format == "torch":
        return encode_torch(tensors, packed_state)
    return encode_safetensors(tensors, packed_state)
