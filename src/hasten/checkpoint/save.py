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
    encode,
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
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None or self._draft is None or not self.is_main or self._is_finished:
            return
        self._is_finished = True
        try:
            self._draft.abort()
        except OSError as problem:  # the next save removes it
            log.warning(
                "the draft of %s could not be removed now: %s",
                self._draft.name,
                problem,
            )

    # -- the draft --------------------------------------------------------------------------------------------------
    def start(
        self,
        together: Agreement,
        name: str | None,
        at_least: int = 0,
        *,
        node: int = 0,
        each_node: bool = False,
    ) -> None:
        """Start a draft on every disk: one if all ranks share it, else one per machine.

        Without a name, the checkpoint gets the next free number from `at_least` on. `node` is the index of this rank's machine.
        Raises: CheckpointError when machines do not share the folder and `each_node` is False.
        """
        store, comm = self.store, together.comm
        together.label = f"starting a checkpoint in {store.address}"
        if comm.rank == 0:
            self._draft = (
                store.begin_numbered(at_least) if name is None else store.begin(name)
            )
        if comm.size == 1:
            return
        name, token = together.share(
            None if self._draft is None else (self._draft.name, self._draft.token)
        )[0]
        if self._draft is None:
            self._draft = store.join(name, token)
        seen: list[tuple[int, bool]] = together.share((node, self._draft is not None))
        blind_ranks = [
            rank for rank, (_, sees) in zip(comm.ranks, seen, strict=True) if not sees
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
            for rank, (other_node, _) in zip(comm.ranks, seen, strict=True)
            if other_node == node
        )
        if self.is_main and comm.rank != 0:
            self._draft = store.begin(name)
        tokens = together.share(self.draft.token if self.is_main else None)
        if not self.is_main:
            self._draft = store.join(name, tokens[comm.ranks.index(self.ranks[0])])
        if self._draft is None:
            raise CheckpointError(
                f"rank {self._rank} does not see {store.address} of its machine {node}, so its files would be missing. Nothing was "
                "saved. Use a folder that all processes of a machine share."
            )

    # -- this rank's files ------------------------------------------------------------------------------------------
    def plan(
        self,
        tree: StateTree,
        together: Agreement,
        announce: Callable[[Sequence[Tensor]], None] | None = None,
    ) -> None:
        """Plan this rank's files and compute their layout; no byte is copied yet.

        `announce` is called with the tensors this rank will write before the layout, so that copies run concurrently.
        Raises: MismatchError when ranks do not save the same components.
        """
        together.label = f"preparing the checkpoint {self.draft.name!r}"
        if together.comm.size > 1:
            _check_same_components(tree, together)
        own_plans: list[FilePlan] = []
        for name, component in tree.components.items():
            plans = plan_component(
                name, component, self._rank, self.ranks, self._layout
            )
            self._components[name] = ComponentRecord(
                kind=component.kind, per_rank=component.per_rank
            )
            if len(plans) > 1 and component.kind == "model" and self.is_main:
                stem, _, end = plans[0].name.partition("-00001-of-")
                index = f"{stem}.{end.partition('.')[2]}.index.json"
                self.blobs[index] = hub_index(plans, component)
            own_plans += [plan for plan in plans if plan.writer == self._rank]
        if announce is not None:
            tensors = []
            for plan in own_plans:
                values = tree.components[plan.component].tensors
                tensors += [local_data(values[key]) for key in plan.keys]
            announce(tensors)
        for plan in own_plans:
            assert plan.name not in self.blobs, (
                f"{plan.name} belongs to {plan.component} and {self._component_of[plan.name]}"
            )
            self.blobs[plan.name] = encode(tree.components[plan.component], plan)
            self._component_of[plan.name] = plan.component

    # -- writing ----------------------------------------------------------------------------------------------------
    def write(self, header: Manifest, together: Agreement) -> Manifest:
        """Write this rank's files, vote and commit; return the manifest on the main ranks, elsewhere the header.

        Safe on a background thread when `together` is of a separate group.
        Raises: CheckpointError on every rank if one failed; earlier checkpoints are unchanged.
        """
        together.label = f"writing the checkpoint {self.draft.name!r}"
        records = []
        for file, record in self.draft.put(self.blobs).items():
            # None for indexes and files of hooks
            component = self._component_of.get(file)
            rank = None if component is None else self._rank
            records.append(
                msgspec.structs.replace(record, component=component, rank=rank)
            )
        records_of_ranks: list[list[FileRecord]] = together.share(records)
        together.label = f"committing the checkpoint {self.draft.name!r}"
        manifest = header
        if self.is_main:
            files: dict[str, FileRecord] = {}
            for rank, written in zip(
                together.comm.ranks, records_of_ranks, strict=True
            ):
                if rank in self.ranks:
                    _add_records(files, written)
            for hook_file in self.draft.hook_files(list(files)):
                files[hook_file.name] = hook_file
            manifest = msgspec.structs.replace(
                header,
                world_size=together.comm.size,
                ranks=self.ranks,
                components=self._components,
                files=tuple(sorted(files.values(), key=attrgetter("name"))),
            )
            self.draft.commit(manifest)
            self._is_finished = True
        together.share()  # every disk has the new checkpoint
        return manifest


def _add_records(files: dict[str, FileRecord], written: Sequence[FileRecord]) -> None:
    for file in written:
        if files.setdefault(file.name, file) != file:
            raise CheckpointError(
                f"save hooks wrote {file.name} on several ranks with different content, and only one can be stored. "
                "Nothing was saved. Let the main process alone write it, or give every rank's file another name."
            )


def _check_same_components(tree: StateTree, together: Agreement) -> None:
    """Raise MismatchError unless ranks save the same components, and whole components hold the same tensors."""
    comm = together.comm
    described: list[Any] = []
    for name, c in tree.components.items():
        shapes = (
            []
            if c.per_rank or c.sliced
            else sorted((k, str(v.shape)) for k, v in c.tensors.items())
        )
        described.append((name, c.kind, c.per_rank, c.sliced, shapes))
    digest = hashlib.sha256(json.dumps(described).encode()).hexdigest()
    views = together.share((digest, sorted(tree.components)))
    if len({digest for digest, _ in views}) > 1:
        listed = "; ".join(
            f"rank {comm.ranks[i]}: {names}" for i, (_, names) in enumerate(views)
        )
        raise MismatchError(
            f"ranks do not save the same state ({listed}, or other shapes under these names), so the checkpoint would "
            "be inconsistent. Prepare and register the same objects on every rank."
        )


def save_tree(
    store: CheckpointStore,
    name: str,
    tree: StateTree,
    header: Manifest,
    comm: Comm,
    node: int = 0,
) -> Manifest:
    """Save a tree as one checkpoint. Ranks: every rank."""
    with agreeing(comm, f"saving {name!r}") as together, Save(store, comm) as save:
        save.start(together, name, node=node)
        save.plan(tree, together)
        return save.write(header, together)
