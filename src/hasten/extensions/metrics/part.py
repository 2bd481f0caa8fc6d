"""Metrics of one Accelerator: its components are read by the threads that serve and post metrics, when these ask.

The training thread only stores the newest loss and gradient norm, once a second at most; no thread waits for a device.
"""

from __future__ import annotations

import atexit
import socket
import sys
import time
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from hasten.accelerator.components import Components, components
from hasten.accelerator.setup import RunLogPart
from hasten.comm.agreement import agree
from hasten.config.root import Config
from hasten.extensions.metrics.catalogue import RankReading, metrics_text
from hasten.extensions.metrics.server import MetricsServer, access_of
from hasten.extensions.metrics.settings import MetricsSettings
from hasten.optim.run_part import RunPart
from hasten.optional import check_installed
from hasten.progress.meter import MemoryGauge
from hasten.progress.scalars import LateScalars
from hasten.runtime.context import ProcessContext
from hasten.runtime.devices import kind_of
from hasten.tracking.goodput import LiveGoodput
from hasten.tracking.run_log import FOLDER, RunLog
from hasten.version import __version__

if TYPE_CHECKING:
    from hasten.accelerator.facade import Accelerator

SampledName = Literal["loss", "grad_norm"]


class SampledScalars:
    """The newest known loss and gradient norm as numbers. `see` is called by the training thread, for a value that is due.

    A tensor on a device is copied to the host without waiting, and read after its arrival, by a later call.
    """

    def __init__(self, device: torch.device) -> None:
        self.known: dict[str, float] = {}
        self.loss_due = self.norm_due = True
        """Whether the next loss or gradient norm is to be given to `see`; a plain attribute, because every step asks."""
        self._late = LateScalars()
        self._lazy = kind_of(device).lazy

    def request(self) -> None:
        """Have the next loss and gradient norm stored, in any thread."""
        self.loss_due = self.norm_due = True

    def see(self, name: SampledName, value: object) -> None:
        """Store the value; the next one of this name is stored after a request."""
        if name == "loss":
            self.loss_due = False
        else:
            self.norm_due = False
        if isinstance(value, Tensor):
            if type(value) is not Tensor or value.numel() != 1 or self._lazy:
                return
            if value.is_cuda and torch.cuda.is_current_stream_capturing():
                return
            self._late.give({name: value.detach()})
        elif isinstance(value, int | float):
            self._late.give({name: float(value)})
        found = self._late.read()
        self.known = {
            one: number for one, number in found.items() if isinstance(number, float)
        }


class Metrics(RunPart):
    """Metrics of one run, which stop with its Accelerator, at `end_training()`, or at exit."""

    def __init__(self) -> None:
        self.rank: RankMetrics | None = None

    def built(self, run: Components) -> None:
        """Start the thread that serves them. Ranks: every rank."""
        accelerator = run.accelerator
        check_installed(
            "prometheus_client",
            why=f"metrics.port={accelerator.config.section(MetricsSettings).port}",
        )
        run_log = run.run_log
        if run_log is None:  # counts times, and writes nothing
            run_log = RunLog(None, accelerator.ctx.rank, dict, lambda: None)
            run.clock.parts.add(RunLogPart(run_log, run.clock))
        self.rank = rank = RankMetrics(accelerator, run_log)
        run_log.every_second = rank.sampled.request
        rank.start(accelerator.config, accelerator.ctx)
        at_exit: Callable[[], None] = partial(_close, weakref.ref(rank))
        atexit.register(at_exit)
        weakref.finalize(accelerator, _forget, rank.close, at_exit).atexit = False

    def loss(self, loss: Tensor, weight: float | Tensor | None) -> None:
        """Store the loss once a second."""
        if self.rank is not None and self.rank.sampled.loss_due:
            self.rank.sampled.see("loss", loss)

    def clipped(self, norm: Tensor) -> None:
        """Store the norm once a second."""
        if self.rank is not None and self.rank.sampled.norm_due:
            self.rank.sampled.see("grad_norm", norm)

    def end(self) -> None:
        """Stop the thread."""
        if self.rank is not None:
            self.rank.close()


class RankMetrics:
    """Reader of an Accelerator's components, and the thread that serves the readings."""

    def __init__(self, accelerator: Accelerator, run_log: RunLog) -> None:
        config, ctx = accelerator.config, accelerator.ctx
        self.sampled = SampledScalars(ctx.device)
        # the threads must not keep the Accelerator alive
        self._owner = weakref.ref(accelerator)
        self._labels = labels_of(config, ctx)
        self._facts = {
            "version": __version__,
            "strategy": accelerator.strategy,
            "script": Path(sys.argv[0]).name,
        }
        self._world_size = ctx.world.size * max(
            1, getattr(_replicas(config), "replicas", 1)
        )
        self._restarts = ctx.topology.restart_count
        self._gauges = {"host": MemoryGauge(torch.device("cpu"))}
        if ctx.device.type != "cpu":
            self._gauges["device"] = MemoryGauge(ctx.device)
        folder = config.project.project_dir
        local = None if folder is None or "://" in folder else Path(folder) / FOLDER
        self._goodput = LiveGoodput(local, ctx.rank)
        self._run_log = weakref.ref(run_log)
        self.server: MetricsServer | None = None

    def start(self, config: Config, ctx: ProcessContext) -> None:
        """Start the thread. Ranks: every rank. Raises: ConfigError on every rank for settings that one cannot honour."""
        metrics = config.section(MetricsSettings)
        assert metrics.port is not None, "metrics are served"
        with agree(ctx.world, "starting the metrics"):
            number = number_of(
                config, ctx.topology.local_rank, ctx.topology.local_world_size
            )
            port = metrics.port + (number if metrics.port else 0)
            self.server = MetricsServer(port, access_of(metrics), self.text)
        self.server.start()

    def close(self) -> None:
        """Stop the thread."""
        if self.server is not None:
            self.server.close()

    def text(self) -> str:
        """Return the metrics of now in Prometheus's text format; empty if the Accelerator is gone."""
        reading = self.read()
        return "" if reading is None else metrics_text(reading, self._labels)

    def read(self) -> RankReading | None:
        """Return the numbers of now, without waiting for the training or a device; None if the Accelerator is gone."""
        accelerator, log = self._owner(), self._run_log()
        if accelerator is None or log is None:
            return None
        known_parts = components(accelerator)
        clock, optimizers = known_parts.clock, list(known_parts.prepared.optimizers)
        status = clock.parts.read_numbers()
        goodput, save, now = self._goodput.read(log), log.last_save, time.time()
        sizes = {kind: gauge.used_bytes() for kind, gauge in self._gauges.items()}
        known = self.sampled.known
        # a run whose optimizer is not prepared makes no updates that would
        self.sampled.request()
        return RankReading(
            facts=self._facts,
            world_size=self._world_size,
            uptime_s=max(now - log.process_began_s, 0.0),
            step=max((one.num_updates for one in optimizers), default=0),
            updates=clock.num_updates,
            samples=log.samples,
            step_age_s=max(time.perf_counter() - log.updated_s, 0.0),
            loss=known.get("loss"),
            grad_norm=known.get("grad_norm"),
            tokens_per_second=status.get("tokens_per_second"),
            mfu=status.get("mfu"),
            memory_bytes={
                kind: size for kind, size in sizes.items() if size is not None
            },
            data_wait=_data_wait(log),
            stalls=log.num_stalls,
            restarts=self._restarts,
            skipped=log.num_skipped,
            saves=log.num_saves,
            checkpoint_age_s=None if save is None else max(now - save[0], 0.0),
            checkpoint_s=None if save is None else save[1],
            seconds=goodput.seconds,
            goodput=goodput.ratio,
            replicas_present=status.get("replicas"),
            replicas_lost=status.get("replicas_lost"),
            replicas_joined=status.get("replicas_joined"),
            samples_returned=status.get("samples_returned"),
            replicas_waiting_s=status.get("replicas_waiting_s"),
        )


def _data_wait(log: RunLog) -> float | None:
    """Return the share of the wait for data in the last minute of steps; None before the first second."""
    readings = list(log.readings)
    total, waited = sum(log.spent.values()), log.spent["data"]
    passed = total - readings[0][0]
    return (
        None if passed <= 0 else min(max((waited - readings[0][1]) / passed, 0.0), 1.0)
    )


def labels_of(config: Config, ctx: ProcessContext) -> dict[str, str]:
    """Return the labels of every sample: job, rank and machine."""
    folder = config.project.project_dir
    named = Path(folder.rstrip("/")).name if folder else Path(sys.argv[0]).stem
    rank = str(number_of(config, ctx.rank, ctx.world.size))
    return {
        "job": config.section(MetricsSettings).job or named or "hasten",
        "rank": rank,
        "machine": socket.gethostname(),
    }


def _replicas(config: Config) -> Any:  # Any: settings of another extension
    """Return the settings of replicas that may be lost; None if nothing provides them."""
    return getattr(config, "survive", None)


def number_of(config: Config, rank: int, num_ranks: int) -> int:
    """Return the number of this rank among those of all replicas, of `num_ranks` each; `rank` for other runs and for replicas with names."""
    name = getattr(_replicas(config), "replica", None)
    return (
        int(name) * num_ranks + rank if name is not None and name.isdecimal() else rank
    )


def _close(ref: weakref.ref[RankMetrics]) -> None:
    if (made := ref()) is not None:
        made.close()


def _forget(close: Callable[[], None], at_exit: Callable[[], None]) -> None:
    atexit.unregister(at_exit)
    close()


def metrics_of(accelerator: Accelerator) -> RankMetrics | None:
    """Return the metrics of a run, for programs that read them in its process; None if it serves none."""
    for part in components(accelerator).clock.parts.members:
        if isinstance(part, Metrics):
            return part.rank
    return None
