"""Metrics of one Accelerator: its components are read by the threads that serve and post metrics, when these ask.

The training thread only stores the newest loss and gradient norm, once a second at most; no thread waits for a device.
"""

from __future__ import annotations

import logging
import socket
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from hasten.accelerator.components import Components, components
from hasten.accelerator.setup import RunLogPart
from hasten.config.root import Config
from hasten.extensions.metrics.reading import RankReading
from hasten.extensions.metrics.settings import MetricsSettings
from hasten.optim.run_part import RunPart
from hasten.optional import check_installed
from hasten.progress.meter import MemoryGauge
from hasten.progress.scalars import LateScalars
from hasten.runtime.context import ProcessContext
from hasten.runtime.devices import kind_of
from hasten.tracking.run_log import USEFUL, RunLog
from hasten.version import __version__

if TYPE_CHECKING:
    from prometheus_client.exposition import ThreadingWSGIServer

    from hasten.accelerator.facade import Accelerator

log = logging.getLogger(__name__)
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

    def request_values(self) -> None:
        """Have the next loss and gradient norm stored, in any thread."""
        self.loss_due = self.norm_due = True

    def store_value(self, replica_name: SampledName, value: object) -> None:
        """Store the value; the next one of this name is stored after a request."""
        if replica_name == "loss":
            self.loss_due = False
        else:
            self.norm_due = False
        if isinstance(value, Tensor):
            if type(value) is not Tensor or value.numel() != 1 or self._lazy:
                return
            if value.is_cuda and torch.cuda.is_current_stream_capturing():
                return
            self._late.store_values({replica_name: value.detach()})
        elif isinstance(value, int | float):
            self._late.store_values({replica_name: float(value)})
        known_numbers = {}
        for scalar_name, number in self._late.read().items():
            if isinstance(number, float):
                known_numbers[scalar_name] = number
        self.known = known_numbers


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
        run_log.every_second = rank.sampled.request_values
        rank.start(accelerator.config, accelerator.ctx)
        # in a thread: the serving one cannot wait for itself
        closing = threading.Thread(target=rank.close, daemon=True)
        weakref.finalize(accelerator, closing.start).atexit = False

    def loss(self, loss: Tensor, weight: float | Tensor | None) -> None:
        """Store the loss once a second."""
        if self.rank is not None and self.rank.sampled.loss_due:
            self.rank.sampled.store_value("loss", loss)

    def clipped(self, norm: Tensor) -> None:
        """Store the norm once a second."""
        if self.rank is not None and self.rank.sampled.norm_due:
            self.rank.sampled.store_value("grad_norm", norm)

    def end(self) -> None:
        """Stop the thread."""
        if self.rank is not None:
            self.rank.close()


class RankMetrics:
    """Reader of an Accelerator's components, and the thread that serves the readings."""

    def __init__(self, accelerator: Accelerator, run_log: RunLog) -> None:
        config = accelerator.config
        ctx = accelerator.ctx
        self.sampled = SampledScalars(ctx.device)
        # the threads must not keep the Accelerator alive
        self._owner = weakref.ref(accelerator)
        self._labels = labels_of(config, ctx)
        self._facts = {
            "version": __version__,
            "strategy": accelerator.strategy,
            "script": Path(sys.argv[0]).name,
        }
        num_replicas = getattr(_replica_settings(config), "replicas", 1)
        self._world_size = ctx.world.size * max(1, num_replicas)
        self._restarts = ctx.topology.restart_count
        self._gauges = {"host": MemoryGauge(torch.device("cpu"))}
        if ctx.device.type != "cpu":
            self._gauges["device"] = MemoryGauge(ctx.device)
        self._run_log = weakref.ref(run_log)
        self.server: ThreadingWSGIServer | None = None
        """The server; None while nothing is served."""

    def start(self, config: Config, ctx: ProcessContext) -> None:
        """Serve the readings; a port that is taken is reported and does not end the training."""
        metrics = config.section(MetricsSettings)
        assert metrics.port is not None, "metrics are served"
        topology = ctx.topology
        local_rank = number_of(config, topology.local_rank, topology.local_world_size)
        port = metrics.port and metrics.port + local_rank
        # needs the optional package
        from hasten.extensions.metrics.catalogue import RankCollector, serve_metrics

        collector = RankCollector(self.read_metrics, self._labels)
        try:
            self.server = serve_metrics(metrics.host, port, collector)
        except (OSError, OverflowError) as error:
            log.warning(
                "metrics are not served at %s:%d (%s); the training is not affected. Set metrics.port to a free one, with a free port for "
                "every rank of the machine.",
                metrics.host,
                port,
                error,
            )
        else:
            log.info(
                "metrics are served at %s:%d", metrics.host, self.server.server_port
            )

    def close(self) -> None:
        """Stop serving and free the port."""
        server = self.server
        self.server = None
        if server is not None:
            server.shutdown()
            server.server_close()

    def read_metrics(self) -> RankReading | None:
        """Return the numbers of now, without waiting for the training or a device; None if the Accelerator is gone."""
        accelerator = self._owner()
        run_log = self._run_log()
        if accelerator is None or run_log is None:
            return None
        run_components = components(accelerator)
        clock = run_components.clock
        prepared = run_components.prepared
        step = max([optimizer.num_updates for optimizer in prepared.optimizers] or [0])
        status = clock.parts.read_numbers()
        now_s = time.time()
        save_age_s: float | None = None
        save_duration_s: float | None = None
        if run_log.last_save is not None:
            saved_at_s, save_duration_s = run_log.last_save
            save_age_s = max(now_s - saved_at_s, 0.0)
        memory_bytes = {}
        for kind, gauge in self._gauges.items():
            num_bytes = gauge.used_bytes()
            if num_bytes is not None:
                memory_bytes[kind] = num_bytes
        sampled = self.sampled.known
        # a run whose optimizer is not prepared makes no updates that would
        self.sampled.request_values()
        uptime_s = max(now_s - run_log.process_began_s, 0.0)
        seconds = _seconds_by_cause(run_log, uptime_s)
        return RankReading(
            facts=self._facts,
            memory_bytes=memory_bytes,
            seconds=seconds,
            numbers={
                "hasten_world_size": self._world_size,
                "hasten_step": step,
                "hasten_updates_total": clock.num_updates,
                "hasten_samples_total": run_log.samples,
                "hasten_loss": sampled.get("loss"),
                "hasten_grad_norm": sampled.get("grad_norm"),
                "hasten_tokens_per_second": status.get("tokens_per_second"),
                "hasten_mfu_ratio": status.get("mfu"),
                "hasten_uptime_seconds": uptime_s,
                "hasten_last_step_age_seconds": max(
                    time.perf_counter() - run_log.updated_s, 0.0
                ),
                "hasten_stalls_total": run_log.num_stalls,
                "hasten_restarts_total": self._restarts,
                "hasten_skipped_updates_total": run_log.num_skipped,
                "hasten_checkpoints_total": run_log.num_saves,
                "hasten_checkpoint_age_seconds": save_age_s,
                "hasten_checkpoint_duration_seconds": save_duration_s,
                "hasten_goodput_ratio": seconds["useful"] / max(uptime_s, 1e-9),
                "hasten_replicas": status.get("replicas"),
                "hasten_replicas_lost_total": status.get("replicas_lost"),
                "hasten_replicas_joined_total": status.get("replicas_joined"),
                "hasten_samples_returned_total": status.get("samples_returned"),
                "hasten_replicas_waiting_seconds": status.get("replicas_waiting_s"),
            },
        )


def _seconds_by_cause(run_log: RunLog, uptime_s: float) -> dict[str, float]:
    """Return the wall time of this process by cause; `running` is the phase that has not ended."""
    spent_s = dict(run_log.spent)
    startup_s = uptime_s if run_log.startup_s is None else run_log.startup_s
    seconds = {"useful": sum(spent_s[phase] for phase in USEFUL), "startup": startup_s}
    for phase in ("data", "checkpoint", "evaluation", "stall"):
        seconds[phase] = spent_s[phase]
    seconds["running"] = max(uptime_s - sum(seconds.values()), 0.0)
    return seconds


def labels_of(config: Config, ctx: ProcessContext) -> dict[str, str]:
    """Return the labels of every sample: job, rank and machine."""
    folder = config.project.project_dir
    folder_name = Path(folder.rstrip("/")).name if folder else Path(sys.argv[0]).stem
    rank = str(number_of(config, ctx.rank, ctx.world.size))
    return {
        "job": config.section(MetricsSettings).job or folder_name or "hasten",
        "rank": rank,
        "machine": socket.gethostname(),
    }


def _replica_settings(config: Config) -> Any:  # Any: settings of another extension
    """Return the settings of replicas that may be lost; None if nothing provides them."""
    return getattr(config, "survive", None)


def number_of(config: Config, rank: int, num_ranks: int) -> int:
    """Return the number of this rank among those of all replicas, of `num_ranks` each; `rank` for other runs and for replicas with names."""
    replica_name = getattr(_replica_settings(config), "replica", None)
    if replica_name is not None and replica_name.isdecimal():
        return int(replica_name) * num_ranks + rank
    return rank


def metrics_of(accelerator: Accelerator) -> RankMetrics | None:
    """Return the metrics of a run, for programs that read them in its process; None if it serves none."""
    for run_part in components(accelerator).clock.parts.members:
        if isinstance(run_part, Metrics):
            return run_part.rank
    return None
