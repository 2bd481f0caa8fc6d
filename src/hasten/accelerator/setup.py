"""Building an Accelerator's parts from what it was given: settings, process, strategy, precision, clock."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from hasten.accelerator import rehearsal
from hasten.accelerator.recording import open_run_log
from hasten.accelerator.rehearsal import Rehearsal
from hasten.comm.agreement import agree
from hasten.comm.process_group import ProcessGroupComm
from hasten.config import absent
from hasten.config.handoff import unpack
from hasten.config.resolve import Resolved, resolve
from hasten.config.root import Config
from hasten.errors import ArgumentError, ConfigError
from hasten.optim.clock import StepClock
from hasten.precision.base import Precision
from hasten.precision.build import build as build_precision
from hasten.progress.scalars import fetch_scalars
from hasten.runtime import bootstrap, env
from hasten.runtime.affinity import set_affinity
from hasten.runtime.axes import LOSS, Axis
from hasten.runtime.bootstrap import GroupSettings
from hasten.runtime.context import ProcessContext
from hasten.runtime.devices import pci_address
from hasten.runtime.logs import show_logs
from hasten.runtime.mesh_plan import mesh_of
from hasten.runtime.topology import Topology
from hasten.strategies.base import Strategy
from hasten.strategies.choose import choose, device_for
from hasten.tracking.manager import TrackerManager
from hasten.tracking.registry import LogWith
from hasten.tracking.registry import build as build_trackers
from hasten.tracking.run_log import RunLog
from hasten.trust.divergence.replicas import Prepared, Replicas
from hasten.trust.divergence.sentinel import Sentinel, SentinelSettings
from hasten.trust.numbers.numbers import NumbersSettings
from hasten.trust.stall.observe import Observer
from hasten.trust.stall.reception import Reception
from hasten.trust.stall.stall_store import Bulletin
from hasten.trust.stall.status_server import Desk
from hasten.trust.stall.watchdog import Watchdog, WatchSettings

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Parts:
    """What an Accelerator is made of."""

    config: Config
    ctx: ProcessContext
    strategy: Strategy
    precision: Precision
    clock: StepClock
    tracking: TrackerManager
    watchdog: Watchdog | Reception | None
    numbers: NumbersSettings | None
    sentinel: Callable[[Prepared], Sentinel] | None
    """Makes the divergence check over what is prepared; None where there is nobody to compare with."""
    run_log: RunLog | None
    rehearsal: Rehearsal


def build(given: Mapping[str, Any], context: ProcessContext | None = None) -> Parts:
    """The parts for these constructor arguments. Ranks: every rank."""
    if context is not None and not isinstance(context, ProcessContext):
        raise ArgumentError(
            f"Accelerator(context={context!r}) got a {type(context).__name__}, which holds no process groups. Give a ProcessContext, or leave "
            "context out to read the launcher's variables."
        )
    asking = rehearsal.current()
    given = asking.settings(given)
    resolved = _settings(given)
    config = resolved.config
    ctx = context or _context(config)
    strategy = choose(config, ctx)
    accumulation = config.gradient_accumulation
    loss = ctx.groups(*LOSS)
    clock = StepClock(every=accumulation.num_steps, comm=loss, sync_with_dataloader=accumulation.sync_with_dataloader)
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
    own = context is None or given.get("stall") is not None  # who brings a context watches over it
    watchdog = _watchdog(config, ctx, clock) if own else None
    asked = context is None or given.get("divergence") is not None
    sentinel = _sentinel(config, ctx, clock) if asked else None
    clock.marks = run_log = open_run_log(config.project, ctx, resolved.entries, strategy)
    trackers = _trackers(given.get("log_with"), config, ctx)
    if run_log is not None:
        trackers.spent = run_log.logged
    return Parts(config, ctx, strategy, precision, clock, trackers, watchdog, numbers, sentinel, run_log, asking)


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
        plan = set_affinity(topology.local_rank, topology.local_world_size, pci_address(device))
        log.info("cpu affinity: %s", plan.reason)
    return bootstrap.start(topology, device, partial(mesh_of, config, topology.local_world_size), _group(config))


def _watchdog(config: Config, ctx: ProcessContext, clock: StepClock) -> Watchdog | Reception | None:
    """The watchdog of this rank. One process waits for nobody, and has a reception for `hasten top` if `hasten launch` started it."""
    variables = env.snapshot()
    alone = ctx.world.size == 1
    if config.stall == "off" or (alone and env.config(variables) is None):
        return None
    steps = weakref.ref(clock)  # the watching thread must not keep the Accelerator alive

    def step() -> int:
        found = steps()
        return 0 if found is None else found.num_updates

    observer = Observer(ctx.rank, ctx.trail, step, ctx.device.type)
    desk = Desk(observer, ctx.topology, ctx.device, env.runtime_folder(variables))
    if not isinstance(ctx.world, ProcessGroupComm):
        return Reception(desk)
    return Watchdog(
        observer,
        Bulletin(ctx.world.store, ctx.rank),
        ctx.topology,
        WatchSettings(
            after_s=config.stall_after_s,
            then=config.stall,
            timeout_s=_group(config).timeout_s,
            folder=reports_in(config, "stalls"),
        ),
        desk,
    )


def reports_in(config: Config, kind: str) -> Path:
    """The folder for reports of this kind: the run's, else one in the user's home of hasten."""
    folder = config.project.logging_dir or config.project.project_dir
    return Path(folder) if folder else env.home(env.snapshot()) / kind


def _sentinel(config: Config, ctx: ProcessContext, clock: StepClock) -> Callable[[Prepared], Sentinel] | None:
    """What makes the divergence check of this rank; None with one process, which differs from nobody."""
    world = ctx.world
    if not isinstance(world, ProcessGroupComm) or config.divergence == "off":
        return None
    settings = SentinelSettings(config.divergence_every, config.divergence, config.divergence_ignore)
    shares_random = ctx.mesh.size(Axis.TP) > 1

    def make(prepared: Prepared) -> Sentinel:
        return Sentinel(Replicas(prepared, clock, settings.ignored, random=shares_random), ctx, world.store, settings)

    return make


def _numbers(config: Config, strategy: Strategy, precision: Precision) -> NumbersSettings | None:
    """How numbers are watched; None when they are not. Raises: ConfigError for what cannot be honoured."""
    if config.numbers == "off":
        if config.numbers_spike is not None:
            raise ConfigError(
                f"numbers_spike={config.numbers_spike:g} has no effect with numbers=off, which looks at no loss. Set numbers to report, "
                "stop or skip, or leave numbers_spike out."
            )
        return None
    holds_back = config.numbers in ("skip", "rollback")
    if holds_back and precision.scaler is not None and config.numbers_spike is not None:
        raise ConfigError(
            f"numbers_spike={config.numbers_spike:g} with numbers={config.numbers} cannot be honoured under mixed_precision='fp16': the scaler "
            "decides which updates are skipped, and looks at overflow only. Use numbers=stop or report, or 'bf16'."
        )
    return NumbersSettings(
        config.numbers,
        config.numbers_spike,
        strategy.caps.sharded_state,
        config.numbers_rollbacks,
        precision.scaler is not None,
        config.dynamo.makes_cuda_graphs,
    )


def _trackers(log_with: LogWith, config: Config, ctx: ProcessContext) -> TrackerManager:
    folder = config.project.logging_dir or config.project.project_dir
    asked = log_with if log_with is not None else config.tracking.log_with
    any_asked = asked != ()
    with agree(ctx.world, "loading the trackers") if any_asked else nullcontext():
        trackers = build_trackers(asked, missing=config.tracking.missing_tracker, is_main=ctx.is_main)
    return TrackerManager(
        trackers,
        is_main=ctx.is_main,
        rank=ctx.rank,
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
        checked=settings.debug,
    )
