"""Saving and loading the state of a run, as methods for the Accelerator."""

from __future__ import annotations

import logging
import math
import platform
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cached_property, partial
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from hasten.checkpoint.async_writer import AsyncWriter
from hasten.checkpoint.base import CheckpointStore, Format, StateTree
from hasten.checkpoint.format.manifest import Manifest
from hasten.checkpoint.ownership import MachineOwners, divided, gathered, owned_by_axes
from hasten.checkpoint.reader import open_checkpoint
from hasten.checkpoint.state_dicts import LoadReport
from hasten.checkpoint.store.local_store import LocalStore
from hasten.checkpoint.store.locate import (
    check_naming,
    join_place,
    locate,
    locate_existing,
    newest_of_all,
    newest_step,
    next_number,
    number_of,
    numbered,
    open_store,
)
from hasten.checkpoint.store.retention import Retention
from hasten.checkpoint.writer import (
    DiskGroup,
    FileLayout,
    PreparedSave,
    SaveOutcome,
    finish,
    prepare,
    retire_expired,
    start,
)
from hasten.comm.agreement import Agreement, agreeing
from hasten.comm.base import Comm
from hasten.config.sections.loop import ProjectConfiguration
from hasten.errors import CheckpointError, ConfigError, MismatchError
from hasten.runtime.context import ProcessContext
from hasten.runtime.mesh_plan import AXES, Axis
from hasten.state.memory_copies import CopyHolder, MemoryCopies, memory_root
from hasten.state.preemption import FinishFirst, Preemption
from hasten.state.previous_state import PreviousState
from hasten.state.rank_state import with_own_state
from hasten.state.restore import plan_restore
from hasten.state.run_state import (
    LoadHook,
    RunObjects,
    SaveHook,
    collect,
    num_updates,
    run_load_hooks,
    run_postponed,
    run_save_hooks,
)
from hasten.strategies.base import Strategy
from hasten.version import __version__

log = logging.getLogger(__name__)


def automatic_root(project: ProjectConfiguration) -> str:
    """Return the folder of numbered checkpoints. Raises: ConfigError without a project_dir."""
    if project.project_dir is None:
        raise ConfigError(
            "no folder was given and project_dir is not set, so there is no place for checkpoints. Call "
            'save_state("folder"), or set project_dir (in ProjectConfiguration or the Accelerator).'
        )
    return join_place(project.project_dir, "checkpoints")


def find_source(
    project: ProjectConfiguration,
    memory: MemoryCopies | None,
    together: Agreement,
    input_dir: str | Path | None,
    must_exist: bool,
) -> tuple[CheckpointStore, str, bool] | None:
    """Return store and name of the state to load, and whether it is in memory; None if not found and not `must_exist`.

    Ranks: every rank.
    """
    if input_dir is not None:
        together.label = f"looking for {input_dir}"
        return *locate_existing(input_dir), False
    together.label = "looking for the newest checkpoint"
    choice = memory.newest(together) if memory is not None else None
    if choice is not None or not must_exist:
        on_disk = together.share(newest_step(automatic_root(project)) if project.project_dir else None)
        if memory is not None and choice is not None:
            if all(step is None or step <= choice.step for step in on_disk):
                return *memory.fetch(choice, together), True
            if together.comm.rank == 0:
                log.info("the newest checkpoint on the disk is newer than update %d in memory", choice.step)
        elif not must_exist and set(on_disk) == {None}:
            return None
    store = open_store(automatic_root(project))
    return store, newest_of_all(store, together), False


class Saving:
    """Saving and loading of one run's checkpoints; a component of the Accelerator."""

    def __init__(
        self,
        ctx: ProcessContext,
        project: ProjectConfiguration,
        parts: RunObjects,
        *,
        notes: Mapping[str, Any] | None = None,  # Any: JSON shown by `hasten ckpt show`: settings of the run
        layout: FileLayout | None = None,
        whole: bool = False,
    ) -> None:
        self._ctx = ctx
        self._rank = ctx.topology.rank
        self._mesh: dict[str, int] = {}
        for axis in Axis:
            self._mesh[str(axis)] = getattr(ctx.mesh, axis)
        self.project = project
        self._parts = parts
        self.registered = parts.registered
        self._notes = dict(notes or {})
        self.layout = layout
        self.extra_files: Callable[[Path], None] | None = None
        """Function that adds files in the format of another tool to the folder of a save. Ranks: every rank."""
        self.keeps_exports = True
        """False if a save may replace an exported model, or a checkpoint of another tool, in its folder."""
        self.whole = whole
        """True if rank 0 writes whole weights instead of every rank its shards."""
        self.iteration = project.iteration  # the number of the next automatic checkpoint
        self.save_hooks: OrderedDict[int, SaveHook] = OrderedDict()
        self.load_hooks: OrderedDict[int, LoadHook] = OrderedDict()
        self._background: AsyncWriter | None = None
        self._guard: FinishFirst | None = None
        self._newest: str | None = None
        """The checkpoint that was saved or loaded last."""
        self.memory: MemoryCopies | None = None
        """Copies of the newest state in the memory of machines, if enabled."""
        self.on_saved: Callable[[float, float], None] | None = None
        """Called with the time of the state and the seconds of the save after each complete checkpoint, in any thread."""
        self._machine_owners = MachineOwners()

    @property
    def step(self) -> int:
        """The number of updates of the run."""
        return num_updates(self._parts)

    # -- objects to save ------------------------------------------------------------------------------------------
    def skip_number(self) -> None:
        """Leave out the number of the next automatic checkpoint, because another process writes to its folder."""
        self.iteration = next_number(open_store(automatic_root(self.project)).names(), self.iteration) + 1

    def _writer(self) -> AsyncWriter:
        """Return the writer of background saves, created when it is first needed."""
        if self._background is None:
            self._background = AsyncWriter()
        return self._background

    def register_for_checkpointing(self, *objects: Any) -> None:  # Any: objects with state_dict and load_state_dict
        """Save and load these objects too, in this order. Ranks: every rank, with the same objects."""
        for thing in objects:
            if not callable(getattr(thing, "state_dict", None)) or not callable(
                getattr(thing, "load_state_dict", None)
            ):
                raise ConfigError(
                    f"a {type(thing).__name__} cannot be registered for checkpointing: it has no state_dict() and "
                    "load_state_dict(), so there is nothing to save. Add both methods."
                )
        self._parts.registered.extend(objects)

    def register_save_state_pre_hook(self, hook: SaveHook) -> RemovableHandle:
        """Call `hook(models, weights, folder)` before each save; it may edit or remove weights and add files."""
        handle = RemovableHandle(self.save_hooks)
        self.save_hooks[handle.id] = hook
        return handle

    def register_load_state_pre_hook(self, hook: LoadHook) -> RemovableHandle:
        """Call `hook(models, folder)` before each load; models that it removes from the list are its to load."""
        handle = RemovableHandle(self.load_hooks)
        self.load_hooks[handle.id] = hook
        return handle

    # -- saving ---------------------------------------------------------------------------------------------------
    def save_state(
        self,
        output_dir: str | Path | None = None,
        safe_serialization: bool = True,
        blocking: bool = True,
        metrics: Mapping[str, float] | None = None,
    ) -> str:
        """Save the whole state of the run and return its path (complete later, when not blocking).

        Without a folder, checkpoints are numbered under `project_dir/checkpoints`. With `blocking=False` training
        continues during the write; a failure is raised by the next save, `wait_for_saves` or `close`.
        Ranks: every rank. Raises: MissingRanksError when some ranks do not arrive; CheckpointError when one failed.
        """
        world, rank = self._ctx.world, self._rank
        with agreeing(world, "save_state", self.project.checkpoint_arrival_s) as together:
            if self._background is not None:
                self.wait_for_saves()
            if len(modes := set(together.share((blocking, output_dir is None)))) > 1:
                raise MismatchError(
                    f"ranks called save_state with different arguments ((blocking, without a folder): {sorted(modes)}), so "
                    "they would wait for each other at different places. Nothing was saved. Pass the same on every rank."
                )
            run_postponed(self._parts, together)
            if not blocking and self._writer().comm is None:
                together.share()
                self._writer().comm = world.twin()
            store, name = self._target(together, output_dir)
            each_node, node = self.project.save_on_each_node, self._ctx.topology.node_rank
            group = start(store, world, name, node=node, each_node=each_node)
            with group.discarding(rank):
                together.label = f"collecting the state for {name!r}"
                place = join_place(store.address, name)
                header = self._header(name, metrics)
                write = partial(self._write, group, header, store if output_dir is None else None, place)
                tree = self._tree(group, safe_serialization, together)
                if blocking:
                    write(prepare(tree, group, world, self.layout), world)
                else:
                    self._write_in_background(tree, group, write, together)
                return place

    def keep_in_memory(self, every: int) -> None:
        """Copy the state into the memory of this machine and its neighbour, every `every` updates."""
        project, updates = self.project, partial(num_updates, self._parts)
        root = memory_root(self._ctx, every)
        self.memory = MemoryCopies(self._ctx, root, every, updates, self._write_copy, project.checkpoint_arrival_s)
        self.memory.follow(self._parts.clock.loaders)

    def _write_copy(
        self, store: LocalStore, name: str, machine: CopyHolder, together: Agreement, announce: Callable[[int], None]
    ) -> None:
        """Write the state of this machine's ranks; `announce` is called with this rank's bytes first. Ranks: every rank."""
        self.wait_for_saves()
        run_postponed(self._parts, together)
        group = start(store, self._ctx.world, name, node=machine.index, each_node=True)
        with group.discarding(self._rank):
            together.label = f"collecting the state for {name!r}"
            weights = run_save_hooks(self.save_hooks, self._parts, str(group.draft.folder), together)
            tree = collect(self._parts, "safetensors", weights)
            tree = self._machine_owners.owned(tree, machine.ranks, together)
            prepared = prepare(with_own_state(tree, self._parts, together), group, self._ctx.world, self.layout)
            announce(sum(blob.size for blob in prepared.blobs.values()))
            finish(prepared, group, self._ctx.world, self._header(name, None))

    def _tree(self, group: DiskGroup, safe_serialization: bool, together: Agreement) -> StateTree:
        weights = run_save_hooks(self.save_hooks, self._parts, str(group.draft.folder), together)
        if self.extra_files is not None and group.draft.folder is not None:
            self.extra_files(group.draft.folder)
        fmt: Format = "safetensors" if safe_serialization else "torch"
        tree = collect(self._parts, fmt, weights)
        world = self._ctx.world
        if world.size == 1:
            return gathered(tree, world, keeps=True) if self.whole else tree
        if group.ranks == world.ranks:
            tree = owned_by_axes(tree, self._is_first)
        else:  # separate disks: each machine writes everything that its ranks hold
            tree = self._machine_owners.owned(tree, group.ranks, together)
        tree = divided(tree, self._parts.plain_models(), self._ctx)
        if self.whole:
            tree = gathered(tree, world, self._rank == group.ranks[0])
        return with_own_state(tree, self._parts, together)

    def _is_first(self, own: tuple[str, ...]) -> bool:
        """Return True if this rank is the first along all axes except `own` and `pp` (stages hold other parameters)."""
        among = {Axis(name) for name in own} | {Axis.PP}
        if Axis.DP_SHARD in among:
            among.add(Axis.CP)  # torch's mesh includes it
        return self._ctx.mesh.index(self._ctx.rank, *(axis for axis in AXES if axis not in among)) == 0

    def _write(
        self,
        group: DiskGroup,
        header: Manifest,
        numbered_in: CheckpointStore | None,
        place: str,
        prepared: PreparedSave,
        comm: Comm,
    ) -> SaveOutcome:
        """Write and commit; in a store of numbered checkpoints, delete expired ones afterwards."""
        retain = None if numbered_in is None else partial(self._retain, numbered_in)
        outcome = finish(prepared, group, comm, header, retain)
        manifest, self._newest = outcome.info.manifest, place
        if manifest.number is not None:
            self.iteration = max(self.iteration, manifest.number + 1)
        if self.on_saved is not None:
            self.on_saved(header.created_s, max(time.time() - header.created_s, 0.0))
        if self._rank == 0:
            log.info("saved %s (%.1f MB)", place, manifest.num_bytes / 1e6)
        return outcome

    def _retain(self, store: CheckpointStore) -> Sequence[str]:
        project = self.project
        policy = Retention(
            total_limit=project.total_limit,
            keep_best=project.keep_best,
            best_metric=project.best_metric,
            best_mode=project.best_mode,
            keep_every=project.keep_every,
        )
        return retire_expired(store, policy, number_of)

    def _write_in_background(
        self, tree: StateTree, group: DiskGroup, write: Callable[..., SaveOutcome], together: Agreement
    ) -> None:
        writer = self._writer()
        prepared = prepare(tree, group, self._ctx.world, self.layout, writer.begin)
        prepared = replace(prepared, blobs=writer.stage(prepared.blobs))
        if self._guard is None:
            self._guard = FinishFirst(self._join_quietly)
        with self._guard.starting():
            try:
                go = writer.submit(partial(write, prepared, writer.comm), group.draft.name)
                together.share()  # every rank has its thread, so none waits for a missing one
            except BaseException:
                writer.cancel()
                raise
            go.set()

    def _target(self, together: Agreement, output_dir: str | Path | None) -> tuple[CheckpointStore, str]:
        check_naming(output_dir, self.project.automatic_checkpoint_naming)
        if output_dir is not None:
            store, name = locate(output_dir)
            if isinstance(store, LocalStore):
                store.keeps_exports = self.keeps_exports
            return store, name
        store = open_store(automatic_root(self.project))
        together.label = f"looking for checkpoints in {store.address}"
        number = next_number(store.names(), self.iteration) if self._ctx.is_main else None
        return store, numbered(together.share(number)[0])

    def _header(self, name: str, metrics: Mapping[str, float] | None) -> Manifest:
        return Manifest(
            number=number_of(name),
            step=num_updates(self._parts),
            created_s=time.time(),
            mesh=self._mesh,
            versions={
                "hasten": __version__,
                "torch": str(torch.__version__),
                "python": platform.python_version(),
            },
            metrics=_checked(metrics) if metrics is not None else {},
            notes=self._notes,
        )

    # -- saves in flight ------------------------------------------------------------------------------------------
    def wait_for_saves(self) -> None:
        """Block until no save is in flight. Raises: the error of a save that failed in the background."""
        try:
            if self._background is not None:
                self._background.wait()
        finally:
            if self._guard is not None:
                self._guard.remove()

    def _join_quietly(self) -> None:
        try:
            self._writer().wait()
        except Exception as error:  # the process is about to end, so no caller can handle the error
            log.error("the save in flight failed: %s", error)

    def close(self) -> None:
        """Finish the save in flight, free memory and restore signal handlers. Raises: the error of that save."""
        if "preemption" in self.__dict__:
            self.preemption.close()
        try:
            self.wait_for_saves()
        finally:
            if self._background is not None:
                self._background.close()

    # -- loading --------------------------------------------------------------------------------------------------
    def load_state(
        self,
        input_dir: str | Path | None = None,
        strict: bool = True,
        allow_pickle: bool = False,
        verify: bool = True,
        must_exist: bool = True,
    ) -> list[LoadReport]:
        """Restore the run from a checkpoint; return a report for each model, with the names that did not match if not strict.

        Without a folder, the newest complete checkpoint under `project_dir/checkpoints` is loaded, or the copy of
        `checkpoint_in_memory` if that is newer; with `must_exist=False` the list is empty if there is none. Everything is verified on
        every rank before anything in memory changes.
        Ranks: every rank. Raises: a subclass of CheckpointError, naming the file and the problem.
        """
        return self._load(input_dir, strict, allow_pickle, verify, must_exist) or []

    def _load(
        self,
        input_dir: str | Path | None,
        strict: bool = True,
        allow_pickle: bool = False,
        verify: bool = True,
        must_exist: bool = True,
    ) -> list[LoadReport] | None:
        world, arrival_s = self._ctx.world, self.project.checkpoint_arrival_s
        with ExitStack() as outside, agreeing(world, "load_state", arrival_s) as together:
            previous = outside.enter_context(PreviousState())  # also when the ranks fail to leave the block together
            if self._background is not None:
                self.wait_for_saves()
            if (source := find_source(self.project, self.memory, together, input_dir, must_exist)) is None:
                return None
            store, name, from_memory = source
            verify = verify and not from_memory  # memory copies are verified already
            with open_checkpoint(store, name, world, verify=verify, allow_pickle=allow_pickle) as checkpoint:
                together.label = f"checking {name!r} against this run"
                models = run_load_hooks(self.load_hooks, self._parts, str(checkpoint.folder))
                plan = plan_restore(self._parts, models, checkpoint, self._rank, world.size, strict, self._mesh)
                together.share()
                together.label = f"loading {name!r}"
                plan.apply(together, previous)
                number = checkpoint.manifest.number
            place = join_place(store.address, name)
            if self._rank == 0:
                log.info("loaded %s%s", place, " from memory" if from_memory else "")
        if self.memory is not None:
            self.memory.loaded(number if from_memory else None)
        if not from_memory:
            if number is not None and input_dir is None:
                self.iteration = max(self.iteration, number + 1)
            self._newest = place
        return list(map(attrgetter("report"), plan.models))

    def newest(self, wait: bool = False) -> str | None:
        """Return the checkpoint that this run saved or loaded last; `wait` (every rank) includes a save in flight."""
        if wait:
            self.wait_for_saves()
        return self._newest

    def reconfigure(self, strategy: Strategy) -> None:
        """Save and load the objects that another strategy prepares."""
        self._parts.unwrap, self._parts.loops = strategy.unwrap, strategy

    # -- preemption -----------------------------------------------------------------------------------------------
    @cached_property
    def preemption(self) -> Preemption:
        """Listener for the signals of preemption."""
        return Preemption(self._ctx.world)

    @property
    def preempted(self) -> bool:
        """True if any rank was asked to stop (SIGTERM, SIGUSR1). Ranks: every rank, once per step."""
        return self.preemption.agreed()


def _checked(metrics: Mapping[str, float]) -> dict[str, float | None]:
    """Return the metrics as finite numbers; nan and inf become None. Raises: CheckpointError for other values."""
    try:
        numbers = {str(name): float(value) for name, value in metrics.items()}
    except (AttributeError, TypeError, ValueError, RuntimeError) as error:  # no mapping, or values that are no numbers
        raise CheckpointError(
            f"save_state(metrics={metrics!r}) cannot be compared between checkpoints ({error}). Nothing was saved. Pass named "
            "numbers: metrics={'loss': 0.5}."
        ) from error
    return {name: number if math.isfinite(number) else None for name, number in numbers.items()}
