"""One save, read from top to bottom: a draft on every disk, this rank's files, the vote, and the commit."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Sequence
from operator import attrgetter
from types import TracebackType
from typing import Any

import msgspec
from torch import Tensor

from hasten.checkpoint.base import (
    Blob,
    CheckpointStore,
    Draft,
    StateTree,
    local_data,
)
from hasten.checkpoint.format.manifest import ComponentRecord, FileRecord, Manifest
from hasten.checkpoint.writer import (
    FileLayout,
    FilePlan,
    encode_file,
    hub_index,
    plan_component,
)
from hasten.comm.agreement import Agreement, agreeing
from hasten.comm.base import Comm
from hasten.errors import CheckpointError, MismatchError

log = logging.getLogger(__name__)


class Save:
    """A save from its draft to the committed checkpoint; leaving its context with an error discards the draft.

    Ranks: every rank calls `start`, `plan` and `write`, in this order, inside one or two `agreeing` blocks.
    """

    def __init__(
        self, store: CheckpointStore, comm: Comm, layout: FileLayout | None = None
    ) -> None:
        self.store = store
        self.blobs: dict[str, Blob] = {}
        """Contents of the files that this rank writes, by name."""
        self.ranks = comm.ranks
        """Ranks that share the folder; the first of them commits."""
        self._rank = comm.ranks[comm.rank]
        self._layout = layout
        self._draft: Draft | None = None
        self._components: dict[str, ComponentRecord] = {}
        self._component_of: dict[str, str] = {}
        self._is_finished = False

    @property
    def draft(self) -> Draft:
        """The draft that this rank writes into."""
        assert self._draft is not None, "the save was started"
        return self._draft

    @property
    def is_main(self) -> bool:
        """True if this rank commits for those that share its folder."""
        return self._rank == self.ranks[0]

    def __enter__(self) -> Save:
        return self

    def __exit__(
        self,
        error_class: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if (
            error_class is None
            or self._draft is None
            or not self.is_main
            or self._is_finished
        ):
            return
        self._is_finished = True
        try:
            self._draft.abort()
        except OSError as abort_error:  # the next save removes it
            log.warning(
                "the draft of %s could not be removed now: %s",
                self._draft.name,
                abort_error,
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
        store, comm = self.store, agreement.comm
        agreement.label = f"starting a checkpoint in {store.address}"
        if comm.rank == 0:
            if checkpoint_name is None:
                self._draft = store.begin_numbered(at_least)
            else:
                self._draft = store.begin(checkpoint_name)
        if comm.size == 1:
            return
        checkpoint_name, draft_token = agreement.share(
            None if self._draft is None else (self._draft.name, self._draft.token)
        )[0]
        if self._draft is None:
            self._draft = store.join(checkpoint_name, draft_token)
        views_of_ranks: list[tuple[int, bool]] = agreement.share(
            (node, self._draft is not None)
        )
        blind_ranks = [
            rank
            for rank, (_, sees_draft) in zip(comm.ranks, views_of_ranks, strict=True)
            if not sees_draft
        ]
        if not blind_ranks:
            return
        if not each_node:
            raise CheckpointError(
                f"ranks {blind_ranks} do not see {store.address} as rank {comm.ranks[0]} does, so their files would be missing. "
                "Nothing was saved. Use a folder that all machines share, or set save_on_each_node=True in "
                "ProjectConfiguration."
            )
        self.ranks = tuple(
            rank
            for rank, (other_node, _) in zip(comm.ranks, views_of_ranks, strict=True)
            if other_node == node
        )
        if self.is_main and comm.rank != 0:
            self._draft = store.begin(checkpoint_name)
        tokens_of_ranks = agreement.share(self.draft.token if self.is_main else None)
        if not self.is_main:
            self._draft = store.join(
                checkpoint_name, tokens_of_ranks[comm.ranks.index(self.ranks[0])]
            )
        if self._draft is None:
            raise CheckpointError(
                f"rank {self._rank} does not see {store.address} of its machine {node}, so its files would be missing. Nothing was "
                "saved. Use a folder that all processes of a machine share."
            )

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
            own_plans += [
                file_plan for file_plan in file_plans if file_plan.writer == self._rank
            ]
        if announce is not None:
            written_tensors = []
            for file_plan in own_plans:
                component_tensors = tree.components[file_plan.component].tensors
                written_tensors += [
                    local_data(component_tensors[tensor_name])
                    for tensor_name in file_plan.keys
                ]
            announce(written_tensors)
        for file_plan in own_plans:
            assert file_plan.name not in self.blobs, (
                f"{file_plan.name} belongs to {file_plan.component} and {self._component_of[file_plan.name]}"
            )
            self.blobs[file_plan.name] = encode_file(
                tree.components[file_plan.component], file_plan
            )
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
                if rank in self.ranks:
                    _add_records(file_records, rank_records)
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
            self._is_finished = True
        agreement.share()  # every disk has the new checkpoint
        return manifest


def _add_records(
    file_records: dict[str, FileRecord], rank_records: Sequence[FileRecord]
) -> None:
    for file_record in rank_records:
        if file_records.setdefault(file_record.name, file_record) != file_record:
            raise CheckpointError(
                f"save hooks wrote {file_record.name} on several ranks with different content, and only one can be stored. "
                "Nothing was saved. Let the main process alone write it, or give every rank's file another name."
            )


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
