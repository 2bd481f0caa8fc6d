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
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

from hasten.accelerator.planning_hooks import AcceleratorHooks, current
from hasten.comm.agreement import agree
from hasten.comm.collective_log import CollectiveRecord
from hasten.comm.process_group import ProcessGroupComm
from hasten.config import absent
from hasten.config.handoff import unpack
from hasten.config.masking import masked, masked_value
from hasten.config.resolve import Resolved, resolve
from hasten.config.root import Config
from hasten.config.sections.loop import ProjectConfiguration
from hasten.config.source import Path as SettingPath
from hasten.config.source import SettingEntry, shown
from hasten.errors import ArgumentError, ConfigError
from hasten.optim.clock import StepClock
from hasten.optim.loss_weights import LossWeights
from hasten.optional import check_installed
from hasten.precision.base import Precision
from hasten.precision.build import build as build_precision
from hasten.prepare_args import PreparedObjects
from hasten.progress.scalars import fetch_scalars
from hasten.runtime import bootstrap, env
from hasten.runtime.bootstrap import GroupSettings
from hasten.runtime.context import ProcessContext
from hasten.runtime.devices import pci_address
from hasten.runtime.logs import show_logs
from hasten.runtime.mesh_plan import LOSS, Axis, check_mesh, mesh_of
from hasten.runtime.topology import Topology
from hasten.strategies.base import Strategy
from hasten.strategies.choose import choose_strategy, device_for
from hasten.tracking.base import Tracker
from hasten.tracking.manager import TrackerManager
from hasten.trust.numbers.numbers import NumbersSettings
from hasten.version import __version__

if TYPE_CHECKING:  # modules that a plain run on one process does not load
    from hasten.progress.trainjob import TrainJobStatus
    from hasten.state.epochs import EpochLoops
    from hasten.tracking.registry import LogWith
    from hasten.tracking.run_log import RunLog
    from hasten.trust.divergence.divergence_check import DivergenceCheck

log = logging.getLogger(__name__)


def open_run_log(
    project: ProjectConfiguration,
    ctx: ProcessContext,
    entries: Mapping[SettingPath, SettingEntry],
    strategy: Strategy,
    wanted: bool,
    counts: bool = False,
) -> RunLog | None:
    """Return the log of this rank, or None if it is not wanted, without a local project folder or with `run_log` off.

    With `counts`, as metrics need it, the log of such a run counts times and writes nothing.
    """
    folder = project.project_dir
    writes = wanted and folder is not None and project.run_log and "://" not in folder
    if not writes and not counts:
        return None

    def facts() -> dict[str, Any]:  # Any: JSON values
        return {
            "settings": {".".join(path): _setting(entry) for path, entry in entries.items()},
            "strategy": strategy.name,
            "world_size": ctx.world.size,
            "mesh": {str(axis): ctx.mesh.size(axis) for axis in Axis if ctx.mesh.size(axis) > 1},
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

    collectives = ctx.world.collectives if isinstance(ctx.world, ProcessGroupComm) else CollectiveRecord()
    run_log = import_module("hasten.tracking.run_log")  # only a run with a folder has one
    gauge = import_module("hasten.progress.meter").MemoryGauge(ctx.device)  # the same
    made: RunLog = run_log.RunLog(
        Path(folder) / run_log.FOLDER if folder is not None and writes else None,
        ctx.rank,
        facts,
        gauge.used_bytes,
        collectives_s=lambda: collectives.spent_s,
        gradients_s=strategy.caps.gradients_s,
    )
    return made


class EventRecorder:
    """Context manager that records the end of its block in the run log, with its duration or its error.

    Errors of the run log are logged, and never change the outcome of the block.
    """

    def __init__(self, run_log: RunLog, kind: str, step: Callable[[], int] = lambda: 0) -> None:
        """Create a recorder; `step` returns the number of updates of the state that was saved or loaded."""
        self._run_log = run_log
        self._kind = kind
        self._step = step
        self._began = 0.0
        self.nothing_done = False
        """Set in the block to record no event, unless the block raises."""

    def __enter__(self) -> EventRecorder:
        self._began = time.perf_counter()
        try:
            self._run_log.checkpoint_begins()
        except Exception as wrong:  # of any kind: the other ranks are on their way to the save or load
            log.warning("the run log could not note the start of %r: %s", self._kind, wrong)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._run_log.checkpoint_done()
            if self.nothing_done and error is None:
                return
            if error is None:
                step = self._step()
                self._run_log.event(self._kind, seconds=round(time.perf_counter() - self._began, 4), step=step)
                self._run_log.reached(self._kind, step)
            else:
                self._run_log.event(f"{self._kind}: failed", error=masked(f"{type(error).__name__}: {error}"))
            self._run_log.flush()
        except Exception as wrong:  # of any kind: the save or load itself has succeeded on all ranks
            log.warning("the run log could not note %r: %s", self._kind, wrong)


def _setting(entry: SettingEntry) -> list[str]:
    return [shown(masked_value(entry.path[-1], entry.value)), str(entry.source)]


def _device(device: torch.device) -> str:
    if device.type == "cuda":
        return f"{device} ({torch.cuda.get_device_name(device)})"
    return str(device)


@dataclass(frozen=True, slots=True)
class AcceleratorObjects:
    """Parts of an Accelerator."""

    config: Config
    ctx: ProcessContext
    strategy: Strategy
    precision: Precision
    clock: StepClock
    tracking: TrackerManager
    watch: Callable[[object], None] | None
    """Start of the watchdog or of the status server, which ends with the given object; None without them."""
    numbers: NumbersSettings | None
    sentinel: Callable[[PreparedObjects], DivergenceCheck] | None
    """Factory of the divergence check over the prepared objects; None with a single process or if the check is off."""
    run_log: RunLog | None
    rehearsal: AcceleratorHooks | None


def build(given: Mapping[str, Any], context: ProcessContext | None = None) -> AcceleratorObjects:
    """Build the parts for these constructor arguments. Ranks: every rank."""
    if context is not None and not isinstance(context, ProcessContext):
        raise ArgumentError(
            f"Accelerator(context={context!r}) got a {type(context).__name__}, which holds no process groups. Give a ProcessContext, or leave "
            "context out to read the launcher's variables."
        )
    rehearsal = current()
    if rehearsal is not None:
        given = rehearsal.settings(given)
    resolved = _settings(given)
    config = resolved.config
    if context is not None and rehearsal is None:
        check_mesh(config, context.topology.local_world_size, context.mesh)
    ctx = _context_of(config, context)
    strategy = choose_strategy(config, ctx)
    accumulation = config.gradient_accumulation
    loss = ctx.groups(*LOSS)
    clock = StepClock(accumulation.num_steps, LossWeights(loss), accumulation.sync_with_dataloader)
    precision = build_precision(
        config.mixed_precision,
        ctx.device,
        ctx.world,
        autocast=config.autocast,
        scaler=config.scaler,
        fp8=config.fp8,
        in_flight=lambda: clock.in_flight,
        sharded=strategy.caps.sharded_state,
        scales=not strategy.caps.owns_precision,
    )
    numbers = _numbers(config, strategy, precision)
    # the caller that passes a context watches it
    own = context is None or resolved.source("trust.stall").kind == "code"
    first = config.survive.replica in (None, "0")  # one replica writes the run's log and trackers
    run_log = open_run_log(config.project, ctx, resolved.entries, strategy, first, serves_metrics(config))
    watch = _watch(config, ctx, clock, run_log) if own else None
    asked = context is None or resolved.source("trust.divergence").kind == "code"
    sentinel = _sentinel(config, ctx, clock) if asked else None
    trackers = _trackers(given.get("log_with"), config, ctx)
    if run_log is not None:
        clock.listening().phases = run_log
        if run_log.tells_phases:
            clock.listening().update_begins = run_log.optimizer_begins
    return AcceleratorObjects(
        config, ctx, strategy, precision, clock, trackers, watch, numbers, sentinel, run_log, rehearsal
    )


def _context_of(config: Config, context: ProcessContext | None) -> ProcessContext:
    if config.survive.lighthouse is not None:
        return _replica_context(config, context)
    if context is not None:
        return context
    if config.survive.replicas:
        raise ConfigError(
            f"survive.replicas={config.survive.replicas} without a lighthouse, so this process would train alone; start the script with "
            f"`hasten launch --replicas {config.survive.replicas}`, or remove the setting."
        )
    return _context(config)


def _replica_context(config: Config, context: ProcessContext | None) -> ProcessContext:
    """Return the process context of a replica that may be lost; raise an error for settings and worlds it does not support."""
    replicas = import_module("hasten.survive.build")  # only a run with such replicas needs it
    replicas.check(config)
    ctx = context or _context(config)
    replicas.refuse_worlds(ctx, config.survive)
    return ctx


def _settings(given: Mapping[str, Any]) -> Resolved:
    variables = env.snapshot()
    handed = env.config(variables)
    resolved = resolve(code=given, env=variables, handed=() if handed is None else unpack(handed))
    absent.check(resolved.entries)
    if resolved.config.debug:
        show_logs()
    for note in resolved.notes:
        log.info(note)
    return resolved


def _context(config: Config) -> ProcessContext:
    topology = Topology.from_env(env.snapshot())
    device = device_for(config, topology)
    if config.launch.enable_cpu_affinity:
        affinity = import_module("hasten.runtime.affinity")  # only a run that sets it needs it
        plan = affinity.set_affinity(topology.local_rank, topology.local_world_size, pci_address(device))
        log.info("cpu affinity: %s", plan.reason)
    return bootstrap.start(topology, device, partial(mesh_of, config, topology.local_world_size), _group(config))


def serves_metrics(config: Config) -> bool:
    """Return whether metrics are served. Raises: MissingPackageError without prometheus_client."""
    if config.metrics.port is None:
        return False
    check_installed("prometheus_client", why=f"metrics.port={config.metrics.port}")
    return True


def _watch(
    config: Config, ctx: ProcessContext, clock: StepClock, run_log: RunLog | None
) -> Callable[[object], None] | None:
    """Return the start of this rank's watchdog, or for a single process under `hasten launch` of a status server for `hasten top`."""
    variables = env.snapshot()
    alone = ctx.world.size == 1
    if config.trust.stall == "off" or (alone and env.config(variables) is None):
        return None
    steps = weakref.ref(clock)  # the watchdog's thread must not keep the Accelerator alive

    def step() -> int:
        found = steps()
        return 0 if found is None else found.num_updates

    def rates() -> Mapping[str, float | str]:
        found = steps()
        known = () if found is None else (found.rates, found.members)
        return {name: value for one in known if one is not None for name, value in one().items()}

    noting = None if run_log is None else weakref.ref(run_log)

    def noted(seconds: float, over: bool) -> None:
        if noting is not None and (found := noting()) is not None:
            found.stalled(seconds, over)

    from hasten.trust.stall import watchdog  # a single process that was not launched needs none of it
    from hasten.trust.stall.observe import Observer  # as above
    from hasten.trust.stall.status_server import StatusServer  # as above

    settings = watchdog.WatchSettings(
        after_s=config.trust.stall_after_s,
        then=config.trust.stall,
        timeout_s=_group(config).timeout_s,
        folder=reports_in(config, "stalls"),
        noted=noted,
    )
    observer = Observer(ctx.rank, ctx.collectives, step, ctx.device.type)
    status_server = StatusServer(observer, ctx.topology, ctx.device, env.runtime_folder(variables), rates)
    return partial(watchdog.watch, watchdog=watchdog.watchdog_of(ctx, step, settings), status_server=status_server)


def trainjob_status(ctx: ProcessContext, clock: StepClock, loops: Callable[[], EpochLoops]) -> TrainJobStatus | None:
    """Return the reporter of this run's progress to its TrainJob; None outside of one, and away from the main process."""
    if ctx.rank != 0 or not env.trainjob(variables := env.snapshot()):
        return None
    trainjob = import_module("hasten.progress.trainjob")  # only a TrainJob needs it
    endpoint = trainjob.StatusEndpoint.from_env(variables)
    if endpoint is None:
        return None
    steps, epochs = weakref.ref(clock), weakref.ref(loops())  # the thread must not keep the Accelerator alive

    def step() -> int | None:
        found = steps()
        return None if found is None else found.num_updates

    def share() -> float | None:
        found = epochs()
        return None if found is None else found.share()

    made: TrainJobStatus = trainjob.TrainJobStatus(endpoint, share, step)
    return made


def reports_in(config: Config, kind: str) -> Path:
    """Return the folder for reports of this kind: the run's folder, else one below the user's HASTEN_HOME."""
    folder = config.project.logging_dir or config.project.project_dir
    return Path(folder) if folder else env.home(env.snapshot()) / kind


def _sentinel(
    config: Config, ctx: ProcessContext, clock: StepClock
) -> Callable[[PreparedObjects], DivergenceCheck] | None:
    """Return the factory of the divergence check of this rank; None with a single process, which has no replica."""
    world, trust = ctx.world, config.trust
    if not isinstance(world, ProcessGroupComm) or trust.divergence == "off":
        return None
    divergence = import_module("hasten.trust.divergence.divergence_check")  # a single process needs none of it
    settings = divergence.DivergenceCheckSettings(trust.divergence_every, trust.divergence, trust.divergence_ignore)

    def make(prepared: PreparedObjects) -> DivergenceCheck:
        check: DivergenceCheck = divergence.check_of(prepared, clock, ctx, world.store, settings)
        return check

    return make


def _numbers(config: Config, strategy: Strategy, precision: Precision) -> NumbersSettings | None:
    """Return the settings of the loss and gradient checks; None if off. Raises: ConfigError for impossible combinations."""
    trust = config.trust
    if trust.numbers == "off":
        if trust.numbers_spike is not None:
            raise ConfigError(
                f"trust.numbers_spike={trust.numbers_spike:g} has no effect with trust.numbers=off, which looks at no "
                "loss. Set trust.numbers to report, stop or skip, or leave trust.numbers_spike out."
            )
        return None
    holds_back = trust.numbers in ("skip", "rollback")
    if holds_back and precision.scaler is not None and trust.numbers_spike is not None:
        raise ConfigError(
            f"trust.numbers_spike={trust.numbers_spike:g} with trust.numbers={trust.numbers} cannot be honoured under "
            "mixed_precision='fp16': the scaler decides which updates are skipped, and looks at overflow only. Use trust.numbers=stop or report, or 'bf16'."
        )
    return NumbersSettings(
        trust.numbers,
        trust.numbers_spike,
        strategy.caps.sharded_state,
        trust.numbers_rollbacks,
        precision.scaler is not None,
        config.dynamo.backend != "no" and config.dynamo.makes_cuda_graphs,
    )


def _trackers(log_with: LogWith, config: Config, ctx: ProcessContext) -> TrackerManager:
    folder = config.project.logging_dir or config.project.project_dir
    asked = log_with if log_with is not None else config.tracking.log_with
    trackers: list[Tracker] = []
    rank = ctx.topology.rank
    is_main = rank == 0 and config.survive.replica in (None, "0")
    if asked != ():
        with agree(ctx.world, "loading the trackers"):
            registry = import_module("hasten.tracking.registry")  # only a run with trackers needs it
            trackers = registry.build(asked, missing=config.tracking.missing_tracker, is_main=is_main)
    return TrackerManager(
        trackers,
        is_main=is_main,
        rank=rank,
        directory=Path(folder) if folder else None,
        share=ctx.world.broadcast_object,
        fetch=fetch_scalars,
    )


def _group(settings: Config) -> GroupSettings:
    plain, config = GroupSettings(), settings.process_group
    return GroupSettings(
        backend=config.backend,
        init_method=config.init_method,
        init_timeout_s=plain.init_timeout_s if config.init_timeout is None else config.init_timeout.total_seconds(),
        timeout_s=plain.timeout_s if config.timeout is None else config.timeout.total_seconds(),
    )
