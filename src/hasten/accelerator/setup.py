"""Construction of an Accelerator's parts from its arguments: settings, process, strategy, precision, clock."""

from __future__ import annotations

import logging
import platform
import shlex
import socket
import sys
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hasten.accelerator.components import Components, components
from hasten.comm.agreement import agree
from hasten.comm.collective_log import CollectiveRecord
from hasten.comm.process_group import ProcessGroupComm
from hasten.config.checks import refuse_absent
from hasten.config.handoff import unpack_settings
from hasten.config.masking import masked, masked_value
from hasten.config.resolve import Resolved, resolve
from hasten.config.root import Config
from hasten.config.source import SettingEntry, shown
from hasten.errors import ArgumentError, ConfigError
from hasten.extension import SEVERAL_RANKS, Offer, installed
from hasten.optim.clock import StepClock
from hasten.optim.loader_progress import LoaderCursor
from hasten.optim.run_part import RunPart, parts_of_every_run
from hasten.optim.window import Holder
from hasten.precision.base import Precision
from hasten.precision.build import build_precision as build_precision
from hasten.progress.scalars import fetch_scalars
from hasten.runtime import bootstrap, env
from hasten.runtime.bootstrap import GroupSettings
from hasten.runtime.context import ProcessContext
from hasten.runtime.devices import pci_address
from hasten.runtime.logs import show_logs
from hasten.runtime.mesh_plan import Axis, check_mesh, mesh_of
from hasten.runtime.topology import Topology
from hasten.strategies.base import Strategy
from hasten.strategies.choose import device_for
from hasten.tracking.base import Tracker
from hasten.tracking.manager import TrackerManager
from hasten.trust.numbers.numbers import NumbersSettings
from hasten.version import __version__

# modules that a plain run on one process does not load, and the facade itself
if TYPE_CHECKING:
    from hasten.tracking.registry import LogWith
    from hasten.tracking.run_log import RunLog

log = logging.getLogger(__name__)


def open_run_log(
    settings: Resolved, ctx: ProcessContext, strategy: Strategy
) -> RunLog | None:
    """Return the log of this rank; None without a local project folder, or with `run_log` off."""
    config = settings.config
    folder = config.project.project_dir
    if folder is None or not config.project.run_log or "://" in folder:
        return None
    if not _writes_run(config):
        return None

    def facts() -> dict[str, Any]:  # Any: JSON values
        return {
            "settings": {
                ".".join(path): _setting(entry)
                for path, entry in settings.entries.items()
            },
            "strategy": strategy.name,
            "world_size": ctx.world.size,
            "mesh": {
                str(axis): ctx.mesh.size(axis)
                for axis in Axis
                if ctx.mesh.size(axis) > 1
            },
            "restart": ctx.topology.restart_count,
            "host": socket.gethostname(),
            "device": _device(ctx.device),
            "command": masked(shlex.join(sys.argv)),
            "versions": {
                "hasten": __version__,
                "torch": str(torch.__version__),
                "python": platform.python_version(),
                "platform": platform.platform(),
            },
        }

    if isinstance(ctx.world, ProcessGroupComm):
        collectives = ctx.world.collectives
    else:
        collectives = CollectiveRecord()
    from hasten.progress.meter import MemoryGauge  # only a run with a folder has a log
    from hasten.tracking.run_log import FOLDER, RunLog  # the same

    return RunLog(
        Path(folder) / FOLDER,
        ctx.rank,
        facts,
        MemoryGauge(ctx.device).used_bytes,
        collectives_s=lambda: collectives.spent_s,
        gradients_s=strategy.caps.gradients_s,
    )


class RunLogPart(RunPart):
    """The run log at the events of a run. Its own errors never change the outcome of a save or load."""

    def __init__(self, run_log: RunLog, clock: StepClock) -> None:
        self.run_log = run_log
        self._clock = clock
        self._read_step: Callable[[], int] = lambda: 0
        self._began_s = 0.0

    def built(self, run: Components) -> None:
        """Find out how to read the number of updates, without keeping the Accelerator alive."""
        accelerator = weakref.ref(run.accelerator)
        self._read_step = lambda: (
            0 if (found := accelerator()) is None else components(found).saving.step
        )

    def pass_begins(self, cursor: LoaderCursor) -> None:
        self.run_log.batch_requested()

    def batch_ready(self, cursor: LoaderCursor) -> None:
        self.run_log.batch_arrived(cursor.num_samples or 0)

    def batch(self, cursor: LoaderCursor) -> None:
        self.run_log.batch_requested(self._clock.num_passes == cursor.passes_at_batch)

    def backward(self) -> None:
        self.run_log.backward_begins()

    def backward_done(self) -> None:
        self.run_log.backward_done(exchanged=self._clock.boundary)

    def before_update(self, optimizer: Holder) -> bool:
        self.run_log.optimizer_begins()
        return False

    def after_update(self, optimizer: Holder, applied: bool) -> None:
        self.run_log.optimizer_done()
        if not applied:
            self.run_log.record_skip()

    def before_save(self) -> None:
        self._began_s = time.perf_counter()
        self._note(self.run_log.checkpoint_begins)

    def after_save(self, error: BaseException | None) -> None:
        self._note(lambda: self._record("saved", error))

    def saved(self, taken_s: float, seconds: float) -> None:
        self.run_log.record_save(taken_s, seconds)

    def before_load(self) -> None:
        self.before_save()

    def after_load(self, error: BaseException | None) -> None:
        self._note(lambda: self._record("loaded", error))

    def stalled(self, seconds: float, over: bool) -> None:
        self.run_log.record_stall(seconds, over)

    def end(self) -> None:
        self.run_log.close()

    def _record(self, kind: str, error: BaseException | None) -> None:
        """Record the end of a save or load, with its duration or its error."""
        self.run_log.checkpoint_done()
        if error is None:
            step = self._read_step()
            self.run_log.record_event(
                kind, seconds=round(time.perf_counter() - self._began_s, 4), step=step
            )
        else:
            self.run_log.record_event(
                f"{kind}: failed", error=masked(f"{type(error).__name__}: {error}")
            )
        self.run_log.flush()

    def _note(self, record: Callable[[], None]) -> None:
        try:
            record()
        # of any kind: the other ranks are on their way to the save or load, or have done it
        except Exception as error:
            log.warning("the run log could not note a save or load: %s", error)


def parts_of_extensions(settings: Resolved, num_ranks: int) -> list[RunPart]:
    """Return the parts of a run of so many ranks that extensions offer and the settings ask for."""
    parts: list[RunPart] = []
    for extension in installed():
        for name, place in extension.run_parts.items():
            setting = extension.run_part_settings.get(name)
            if setting == SEVERAL_RANKS:
                is_part = num_ranks > 1
            else:
                is_part = setting is None or _is_set(setting, settings)
            if is_part:
                parts.append(Offer("run_parts", name, place, extension.name).load()())
    return parts


def _is_set(setting: str, settings: Resolved) -> bool:
    """Return whether a setting or section differs from its default, or a $VARIABLE is set."""
    if setting.startswith("$"):
        return bool(env.snapshot().get(setting[1:]))
    path = tuple(setting.split("."))
    for given_path in settings.entries:
        if given_path[: len(path)] == path:
            read = attrgetter(setting)
            return bool(read(settings.config) != read(Config()))
    return False


def _setting(entry: SettingEntry) -> list[str]:
    return [shown(masked_value(entry.path[-1], entry.value)), str(entry.source)]


def _device(device: torch.device) -> str:
    if device.type == "cuda":
        return f"{device} ({torch.cuda.get_device_name(device)})"
    return str(device)


# Any: constructor arguments
def resolve_settings(given: Mapping[str, Any]) -> Resolved:
    """Return the settings of these arguments, the launcher, the environment and files."""
    for part in parts_of_every_run():
        given = part.settings(given)
    variables = env.snapshot()
    handed = variables.get(env.CONFIG)
    resolved = resolve(
        code=given,
        env=variables,
        handed=() if handed is None else unpack_settings(handed),
    )
    refuse_absent(resolved.entries)
    if resolved.config.debug:
        show_logs()
    for note in resolved.notes:
        log.info(note)
    return resolved


def join_world(config: Config, context: ProcessContext | None) -> ProcessContext:
    """Return this process's device and groups: those given, or from the launcher's variables. Ranks: every rank."""
    if context is not None:
        if not isinstance(context, ProcessContext):
            raise ArgumentError(
                f"Accelerator(context={context!r}) got a {type(context).__name__}, which holds no process groups. Give a ProcessContext, or "
                "leave context out to read the launcher's variables."
            )
        if not parts_of_every_run():
            check_mesh(config, context.topology.local_world_size, context.mesh)
        return context
    topology = Topology.from_env(env.snapshot())
    device = device_for(config, topology)
    if config.launch.enable_cpu_affinity:
        # only a run that sets it needs it
        from hasten.runtime.affinity import set_affinity

        log.info("cpu affinity: %s", set_affinity(pci_address(device)))
    group = config.process_group
    group_settings = GroupSettings(group.backend, group.init_method)
    if group.init_timeout is not None:
        init_timeout_s = group.init_timeout.total_seconds()
        group_settings = replace(group_settings, init_timeout_s=init_timeout_s)
    if group.timeout is not None:
        timeout_s = group.timeout.total_seconds()
        group_settings = replace(group_settings, timeout_s=timeout_s)
    mesh_of_world = partial(mesh_of, config, topology.local_world_size)
    return bootstrap.start(topology, device, mesh_of_world, group_settings)


def reports_in(config: Config, kind: str) -> Path:
    """Return the folder for reports of this kind: the run's folder, else one below the user's HASTEN_HOME."""
    folder = config.project.logging_dir or config.project.project_dir
    return Path(folder) if folder else env.home(env.snapshot()) / kind


def numbers_settings(
    config: Config, strategy: Strategy, precision: Precision
) -> NumbersSettings | None:
    """Return the settings of the loss and gradient checks; None if off. Raises: ConfigError for impossible combinations."""
    trust = config.trust
    if trust.numbers == "off":
        if trust.numbers_spike is not None:
            raise ConfigError(
                f"trust.numbers_spike={trust.numbers_spike:g} has no effect with trust.numbers=off, which looks at no "
                "loss. Set trust.numbers to report, stop or skip, or leave trust.numbers_spike out."
            )
        return None
    if (
        trust.numbers == "skip"
        and precision.scaler is not None
        and trust.numbers_spike is not None
    ):
        raise ConfigError(
            f"trust.numbers_spike={trust.numbers_spike:g} with trust.numbers=skip cannot be honoured under "
            "mixed_precision='fp16': the scaler decides which updates are skipped, and looks at overflow only. Use trust.numbers=stop or report, or 'bf16'."
        )
    return NumbersSettings(
        trust.numbers,
        trust.numbers_spike,
        strategy.caps.sharded_state,
        precision.scaler is not None,
        config.dynamo.backend != "no" and config.dynamo.makes_cuda_graphs,
    )


def _writes_run(config: Config) -> bool:
    return all(section.writes_run() for section in config.sections())


def open_trackers(
    log_with: LogWith, config: Config, ctx: ProcessContext
) -> TrackerManager:
    """Return the trackers of this run. Ranks: every rank."""
    folder = config.project.logging_dir or config.project.project_dir
    requested_trackers = log_with if log_with is not None else config.tracking.log_with
    trackers: list[Tracker] = []
    is_main = ctx.topology.rank == 0
    if requested_trackers != ():
        is_main = is_main and _writes_run(config)
        with agree(ctx.world, "loading the trackers"):
            # only a run with trackers needs it
            from hasten.tracking.registry import build_trackers

            trackers = build_trackers(
                requested_trackers,
                missing=config.tracking.missing_tracker,
                is_main=is_main,
            )
    return TrackerManager(
        trackers,
        is_main=is_main,
        directory=Path(folder) if folder else None,
        fetch=fetch_scalars,
    )
