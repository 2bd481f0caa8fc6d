"""Saving and loading the state of a run, as methods for the Accelerator."""

from __future__ import annotations

import logging
import math
import platform
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, Final

import torch
from torch.utils.hooks import RemovableHandle

from hasten.checkpoint.async_writer import AsyncWriter
from hasten.checkpoint.base import Format, StateTree
from hasten.checkpoint.format.manifest import Manifest, checkpoint_number
from hasten.checkpoint.ownership import (
    MachineOwners,
    divide_stages,
    gather_slices,
    owned_by_axes,
)
from hasten.checkpoint.reader import MAX_READ_ATTEMPTS, open_checkpoint
from hasten.checkpoint.retention import retire_expired
from hasten.checkpoint.save import FileLayout, Save
from hasten.checkpoint.state_dicts import LoadReport
from hasten.checkpoint.store.local_store import LocalStore, locate, open_store
from hasten.comm.agreement import Agreement, agreeing
from hasten.config.sections.loop import ProjectConfiguration
from hasten.errors import (
    CheckpointError,
    CheckpointReplacedError,
    ConfigError,
    MismatchError,
)
from hasten.runtime.context import ProcessContext
from hasten.runtime.mesh_plan import AXES, Axis
from hasten.state.load_source import NewerStates, automatic_root, find_source
from hasten.state.loop_position import LoopPosition
from hasten.state.preemption import FinishFirst
from hasten.state.rank_state import with_own_state
from hasten.state.restore import plan_restore
from hasten.state.run_state import (
    LoadHook,
    RunObjects,
    SaveHook,
    collect_state,
    num_updates,
    run_load_hooks,
    run_save_hooks,
)
from hasten.strategies.base import Strategy
from hasten.version import __version__

log = logging.getLogger(__name__)
_RUNS_NOTE: Final = "runs"


class Saving:
    """Saving and loading of one run's checkpoints; a component of the Accelerator."""

    def __init__(
        self,
        ctx: ProcessContext,
        project: ProjectConfiguration,
        run_objects: RunObjects,
        *,
        # Any: JSON shown by `hasten ckpt show`: settings of the run
        notes: Mapping[str, Any] | None = None,
        layout: FileLayout | None = None,
        whole: bool = False,
    ) -> None:
        self._ctx = ctx
        self._rank = ctx.topology.rank
        self._mesh: dict[str, int] = {}
        for axis in Axis:
            self._mesh[str(axis)] = getattr(ctx.mesh, axis)
        self.project = project
        self._run_objects = run_objects
        self.registered = run_objects.registered
        self._notes = dict(notes or {})
        self.layout = layout
        self.extra_files: Callable[[Path], None] | None = None
        """Function that adds files in the format of another tool to the folder of a save. Ranks: every rank."""
        self.keeps_exports = True
        """False if a save may replace an exported model, or a checkpoint of another tool, in its folder."""
        self.whole = whole
        """True if rank 0 writes whole weights instead of every rank its shards."""
        # the number of the next automatic checkpoint
        self.iteration = project.iteration
        self.save_hooks: OrderedDict[int, SaveHook] = OrderedDict()
        self.load_hooks: OrderedDict[int, LoadHook] = OrderedDict()
        self._background: AsyncWriter | None = None
        self._guard: FinishFirst | None = None
        self._run_id = secrets.token_hex(4)
        self._lineage: list[str] = []
        """Ids of the runs that this one continues; their checkpoints are its own."""
        self._newest: str | None = None
        """The checkpoint that was saved or loaded last."""
        self.newer_states: NewerStates | None = None
        """States that may be newer than the checkpoints, from a part of the run."""
        self._machine_owners = MachineOwners()

    @property
    def step(self) -> int:
        """The number of updates of the run."""
        return num_updates(self._run_objects)

    # -- objects to save ------------------------------------------------------------------------------------------

    def _writer(self) -> AsyncWriter:
        """Return the writer of background saves, created when it is first needed."""
        if self._background is None:
            self._background = AsyncWriter()
        return self._background

    # Any: objects with state_dict and load_state_dict
    def register_for_checkpointing(self, *objects: Any) -> None:
        """Save and load these objects too, in this order. Ranks: every rank, with the same objects."""
        for registered_object in objects:
            if not callable(
                getattr(registered_object, "state_dict", None)
            ) or not callable(getattr(registered_object, "load_state_dict", None)):
                raise ConfigError(
                    f"a {type(registered_object).__name__} cannot be registered for checkpointing: it has no state_dict() and "
                    "load_state_dict(), so there is nothing to save. Add both methods."
                )
        self._run_objects.registered.extend(objects)

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
        world = self._ctx.world
        arrival_s = self.project.checkpoint_arrival_s
        run_parts = self._run_objects.clock.parts
        try:
            # the events of parts are within the agreement: one that fails on a rank ends the save on all
            with agreeing(world, "save_state", arrival_s) as agreement:
                for begin_event in run_parts.before_save:
                    if (answer := begin_event()) is not None:
                        return answer
                checkpoint_path = self._save(
                    agreement, output_dir, safe_serialization, blocking, metrics
                )
                for end_event in run_parts.after_save:
                    end_event(None)
                return checkpoint_path
        except BaseException as error:
            for end_event in run_parts.after_save:
                end_event(error)
            raise

    def _save(
        self,
        agreement: Agreement,
        output_dir: str | Path | None,
        safe_serialization: bool,
        blocking: bool,
        metrics: Mapping[str, float] | None,
    ) -> str:
        if self._background is not None:
            self.wait_for_saves()
        modes_of_ranks = set(agreement.share((blocking, output_dir is None)))
        if len(modes_of_ranks) > 1:
            raise MismatchError(
                f"ranks called save_state with different arguments ((blocking, without a folder): {sorted(modes_of_ranks)}), so "
                "they would wait for each other at different places. Nothing was saved. Pass the same on every rank."
            )
        loop_position = self._run_objects.saved_position()
        if not blocking and self._writer().comm is None:
            agreement.share()
            self._writer().comm = self._ctx.world.make_twin()
        metric_values = self._check_metrics(metrics) if metrics else {}
        with ExitStack() as draft_owner:
            save = draft_owner.enter_context(self._start(output_dir, agreement))
            checkpoint_name = save.draft.name
            agreement.label = f"collecting the state for {checkpoint_name!r}"
            manifest_header = self._header(checkpoint_name, metric_values)
            state_tree = self._collect_tree(
                save, safe_serialization, agreement, loop_position
            )
            write_files = partial(
                self._write, save, manifest_header, output_dir is None
            )
            if blocking:
                save.plan(state_tree, agreement)
                write_files(agreement)
            else:
                self._write_in_background(
                    save, state_tree, write_files, agreement, draft_owner
                )
        return save.location

    def _start(self, output_dir: str | Path | None, agreement: Agreement) -> Save:
        """Start a save into a folder, or under the next free number."""
        is_automatic = self.project.automatic_checkpoint_naming
        if output_dir is not None and is_automatic:
            raise ConfigError(
                f"automatic_checkpoint_naming=True numbers every checkpoint under project_dir, but save_state({str(output_dir)!r}) "
                "names a folder; call save_state() without one, or leave automatic_checkpoint_naming out."
            )
        if output_dir is None and is_automatic is False:
            raise ConfigError(
                "save_state() got no folder and automatic_checkpoint_naming=False forbids a numbered one, so there is no place for "
                'the checkpoint; call save_state("folder"), or leave automatic_checkpoint_naming out.'
            )
        checkpoint_name: str | None = None
        if output_dir is None:
            store = open_store(automatic_root(self.project))
        else:
            store, checkpoint_name = locate(output_dir)
        save = Save(store, self._ctx.world, self.layout)
        with save:
            save.start(
                agreement,
                checkpoint_name,
                self.iteration,
                node=self._ctx.topology.node_rank,
                each_node=self.project.save_on_each_node,
            )
        save.draft.keeps_exports = self.keeps_exports
        checkpoint_index = checkpoint_number(save.draft.name)
        if (
            checkpoint_name is None
            and checkpoint_index is not None
            and checkpoint_index > self.iteration
            and self._rank == 0
        ):
            log.warning(
                "%s holds checkpoints up to checkpoint_%d that this run neither wrote nor loaded; this save becomes checkpoint_%d, and "
                "total_limit leaves the others. To continue an earlier run, call load_state(must_exist=False) before the first "
                "save; otherwise give each run its own project_dir",
                *(store.address, checkpoint_index - 1, checkpoint_index),
            )
        return save

    def write_machine(
        self,
        store: LocalStore,
        checkpoint_name: str,
        machine: int,
        machine_ranks: Sequence[int],
        agreement: Agreement,
        announce: Callable[[int], None],
    ) -> None:
        """Write the state of this machine's ranks; `announce` is called with this rank's bytes first. Ranks: every rank."""
        self.wait_for_saves()
        loop_position = self._run_objects.saved_position()
        with Save(store, self._ctx.world, self.layout) as save:
            save.start(agreement, checkpoint_name, node=machine, each_node=True)
            agreement.label = f"collecting the state for {checkpoint_name!r}"
            saved_weights = run_save_hooks(
                self.save_hooks, self._run_objects, str(save.draft.folder), agreement
            )
            state_tree = collect_state(
                self._run_objects, "safetensors", saved_weights, loop_position
            )
            state_tree = self._machine_owners.owned(
                state_tree, machine_ranks, agreement
            )
            save.plan(
                with_own_state(state_tree, self._run_objects, agreement, loop_position),
                agreement,
            )
            announce(sum(blob.size for blob in save.blobs.values()))
            save.write(self._header(checkpoint_name, {}), agreement)

    def _collect_tree(
        self,
        save: Save,
        safe_serialization: bool,
        agreement: Agreement,
        loop_position: LoopPosition,
    ) -> StateTree:
        saved_weights = run_save_hooks(
            self.save_hooks, self._run_objects, str(save.draft.folder), agreement
        )
        if self.extra_files is not None and save.draft.folder is not None:
            self.extra_files(save.draft.folder)
        file_format: Format = "safetensors" if safe_serialization else "torch"
        state_tree = collect_state(
            self._run_objects, file_format, saved_weights, loop_position
        )
        world = self._ctx.world
        if world.size == 1:
            if self.whole:
                return gather_slices(state_tree, world, keeps=True)
            return state_tree
        if save.ranks == world.ranks:
            state_tree = owned_by_axes(state_tree, self._is_first)
        else:  # separate disks: each machine writes everything that its ranks hold
            state_tree = self._machine_owners.owned(state_tree, save.ranks, agreement)
        state_tree = divide_stages(
            state_tree, self._run_objects.plain_models(), self._ctx
        )
        if self.whole:
            state_tree = gather_slices(state_tree, world, save.is_main)
        return with_own_state(state_tree, self._run_objects, agreement, loop_position)

    def _is_first(self, tensor_axes: tuple[str, ...]) -> bool:
        """Return True if this rank is the first along all axes except `own` and `pp` (stages hold other parameters)."""
        excluded_axes = {Axis(axis_name) for axis_name in tensor_axes} | {Axis.PP}
        if Axis.DP_SHARD in excluded_axes:
            excluded_axes.add(Axis.CP)  # torch's mesh includes it
        return (
            self._ctx.mesh.index(
                self._ctx.rank, *(axis for axis in AXES if axis not in excluded_axes)
            )
            == 0
        )

    def _write(
        self,
        save: Save,
        manifest_header: Manifest,
        is_numbered: bool,
        agreement: Agreement,
    ) -> None:
        """Write and commit; after a numbered save, delete the checkpoints of this run that have expired."""
        with save:
            manifest = save.write(manifest_header, agreement)
        self._newest = save.location
        if manifest.number is not None:
            self.iteration = max(self.iteration, manifest.number + 1)
        if is_numbered and save.is_main and self.project.total_limit is not None:
            try:
                retire_expired(save.store, self.project, self._is_own)
            # the checkpoint is safe; the next save deletes again
            except (OSError, CheckpointError) as error:
                log.warning(
                    "after saving %s, old checkpoints could not be deleted: %s",
                    save.location,
                    error,
                )
        for report_save in self._run_objects.clock.parts.saved:
            report_save(
                manifest_header.created_s,
                max(time.time() - manifest_header.created_s, 0.0),
            )
        if self._rank == 0:
            log.info("saved %s (%.1f MB)", save.location, manifest.num_bytes / 1e6)

    def _is_own(self, manifest: Manifest) -> bool:
        """Return True for a checkpoint that this run, or one that it continues, has written."""
        return _read_run_ids(manifest)[-1] in (*self._lineage, self._run_id)

    def _write_in_background(
        self,
        save: Save,
        state_tree: StateTree,
        write_files: Callable[[Agreement], None],
        agreement: Agreement,
        draft_owner: ExitStack,
    ) -> None:
        writer = self._writer()
        save.plan(state_tree, agreement, writer.staging.begin)
        save.blobs = writer.staging.end(save.blobs)
        if self._guard is None:
            self._guard = FinishFirst(self._join_quietly)
        with self._guard.starting():
            try:
                start_event = writer.submit(write_files, save.draft.name)
                # every rank has its thread, so none waits for a missing one
                agreement.share()
            except BaseException:
                writer.cancel()
                raise
            # from here on the draft belongs to the thread: an error on this one must not discard it
            draft_owner.pop_all()
            start_event.set()

    def _header(
        self, checkpoint_name: str, metrics: dict[str, float | None]
    ) -> Manifest:
        return Manifest(
            number=checkpoint_number(checkpoint_name),
            step=num_updates(self._run_objects),
            created_s=time.time(),
            mesh=self._mesh,
            versions={
                "hasten": __version__,
                "torch": str(torch.__version__),
                "python": platform.python_version(),
            },
            metrics=metrics,
            notes={**self._notes, _RUNS_NOTE: [*self._lineage, self._run_id]},
        )

    def _check_metrics(self, metrics: Mapping[str, float]) -> dict[str, float | None]:
        """Return the metrics as finite numbers; nan and inf become None.

        Raises: CheckpointError for other values; ConfigError if `best_metric` is not among them.
        """
        try:
            metric_values = {
                str(metric_name): float(metric_value)
                for metric_name, metric_value in metrics.items()
            }
        except (
            AttributeError,
            TypeError,
            ValueError,
            RuntimeError,
        ) as error:  # no mapping, or values that are no numbers
            raise CheckpointError(
                f"save_state(metrics={metrics!r}) cannot be compared between checkpoints ({error}). Nothing was saved. Pass named "
                "numbers: metrics={'loss': 0.5}."
            ) from error
        best_metric = self.project.best_metric
        if best_metric is not None and best_metric not in metric_values:
            raise ConfigError(
                f"save_state(metrics={metric_values}) lacks best_metric={best_metric!r}, so this checkpoint could never be the best. Nothing "
                f"was saved. Pass metrics={{{best_metric!r}: ...}}, or set best_metric to one of {sorted(metric_values)}."
            )
        return {
            metric_name: metric_number if math.isfinite(metric_number) else None
            for metric_name, metric_number in metric_values.items()
        }

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
        # the process is about to end, so no caller can handle the error
        except Exception as error:
            log.error("the save in flight failed: %s", error)

    def close(self) -> None:
        """Finish the save in flight, free memory and restore signal handlers. Raises: the error of that save."""
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
        world = self._ctx.world
        arrival_s = self.project.checkpoint_arrival_s
        run_parts = self._run_objects.clock.parts
        try:
            with agreeing(world, "load_state", arrival_s):
                for begin_event in run_parts.before_load:
                    begin_event()
                # again if another save replaces the checkpoint meanwhile
                for num_attempts in range(1, MAX_READ_ATTEMPTS + 1):
                    try:
                        reports = self._load(
                            input_dir, strict, allow_pickle, verify, must_exist
                        )
                        break
                    except CheckpointReplacedError:
                        if num_attempts == MAX_READ_ATTEMPTS:
                            raise
                if reports is None:
                    return []
                for end_event in run_parts.after_load:
                    end_event(None)
                return reports
        except BaseException as error:
            for end_event in run_parts.after_load:
                end_event(error)
            raise

    def _load(
        self,
        input_dir: str | Path | None,
        strict: bool = True,
        allow_pickle: bool = False,
        verify: bool = True,
        must_exist: bool = True,
    ) -> list[LoadReport] | None:
        world = self._ctx.world
        with agreeing(world, "load_state") as agreement:
            if self._background is not None:
                self.wait_for_saves()
            load_source = find_source(
                self.project, self.newer_states, agreement, input_dir, must_exist
            )
            if load_source is None:
                return None
            store, checkpoint_name, from_memory = load_source
            verify = verify and not from_memory  # memory copies are verified already
            with open_checkpoint(
                store, checkpoint_name, world, verify=verify, allow_pickle=allow_pickle
            ) as checkpoint:
                agreement.label = f"checking {checkpoint_name!r} against this run"
                models_to_load = run_load_hooks(
                    self.load_hooks, self._run_objects, str(checkpoint.folder)
                )
                restore_plan = plan_restore(
                    self._run_objects,
                    models_to_load,
                    checkpoint,
                    self._rank,
                    world.size,
                    strict,
                    self._mesh,
                )
                agreement.share()
                agreement.label = f"loading {checkpoint_name!r}"
                restore_plan.apply(agreement)
                checkpoint_index = checkpoint.manifest.number
                self._lineage = _read_run_ids(checkpoint.manifest)
            checkpoint_path = f"{store.address.rstrip('/')}/{checkpoint_name}"
            if self._rank == 0:
                log.info(
                    "loaded %s%s",
                    checkpoint_path,
                    " from memory" if from_memory else "",
                )
        if self.newer_states is not None:
            self.newer_states.loaded(checkpoint_index if from_memory else None)
        if not from_memory:
            if checkpoint_index is not None and input_dir is None:
                self.iteration = max(self.iteration, checkpoint_index + 1)
            self._newest = checkpoint_path
        return list(map(attrgetter("report"), restore_plan.models))

    def newest(self) -> str | None:
        """Return the checkpoint that this run saved or loaded last."""
        return self._newest

    def reconfigure(self, strategy: Strategy) -> None:
        """Save and load the objects that another strategy prepares."""
        self._run_objects.unwrap, self._run_objects.drop_gradients = (
            strategy.unwrap,
            strategy.drop_gradients,
        )


def _read_run_ids(manifest: Manifest) -> list[str]:
    """Return the ids of the runs that led to a checkpoint, the one that wrote it last."""
    run_ids: list[str] = manifest.notes.get(_RUNS_NOTE) or [""]
    return run_ids
