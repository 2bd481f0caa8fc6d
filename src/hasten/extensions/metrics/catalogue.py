"""The metrics of a rank: their names and help texts, and their collector for Prometheus's client."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Final, cast

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import ThreadingWSGIServer, start_http_server
from prometheus_client.registry import Collector, CollectorRegistry

from hasten.extensions.metrics.reading import RankReading

HELP: Final = MappingProxyType(
    {
        "hasten_world_size": "Number of ranks of the job.",
        "hasten_step": "Updates of the run, including those before a resume.",
        "hasten_updates_total": "Updates of this process, applied and skipped.",
        "hasten_samples_total": "Samples of all batches of training, over all ranks.",
        "hasten_loss": "Last known loss given to backward() on this rank.",
        "hasten_grad_norm": "Last known norm that clip_grad_norm_() returned.",
        "hasten_tokens_per_second": "Tokens a second over all ranks, after track_throughput().",
        "hasten_mfu_ratio": "Share of the devices' peak, after track_throughput().",
        "hasten_uptime_seconds": "Seconds since the start of the process.",
        "hasten_last_step_age_seconds": "Seconds since the last update, or since the start before the first.",
        "hasten_stalls_total": "Stalls that this rank's watchdog reported.",
        "hasten_restarts_total": "Restarts of the job by its launcher.",
        "hasten_skipped_updates_total": "Updates skipped by this process.",
        "hasten_checkpoints_total": "Complete checkpoints of this process.",
        "hasten_checkpoint_age_seconds": "Seconds since the state of the newest checkpoint that this process completed.",
        "hasten_checkpoint_duration_seconds": "Seconds of the last complete save, with its writing in the background.",
        "hasten_goodput_ratio": "Time in useful steps over wall time.",
        "hasten_replicas": "Replicas of the latest update, of a run that may lose some.",
        "hasten_replicas_lost_total": "Replicas that were lost, as seen by this one.",
        "hasten_replicas_joined_total": "Replicas that have joined, as seen by this one.",
        "hasten_samples_returned_total": "Samples of lost replicas that were given out again.",
        "hasten_replicas_waiting_seconds": "Seconds of the current wait for replicas.",
    }
)
"""Help texts of the metrics without labels of their own; names of counters end in `_total`."""


class RankCollector(Collector):
    """Collector of the readings of one rank; `labels` are those of every sample."""

    def __init__(
        self, read: Callable[[], RankReading | None], labels: Mapping[str, str]
    ) -> None:
        self._read = read
        self._labels = labels

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics; numbers that are not known are left out."""
        reading = self._read()
        if reading is None:
            return
        info = self._make_gauge("hasten_info", "Facts about the rank.", *reading.facts)
        info.add_metric([*self._labels.values(), *reading.facts.values()], 1.0)
        yield info
        for name, value in reading.numbers.items():
            if value is None:
                continue
            is_counter = name.endswith("_total")
            kind = CounterMetricFamily if is_counter else GaugeMetricFamily
            family = kind(name, HELP[name], labels=list(self._labels))
            family.add_metric(list(self._labels.values()), value)
            yield family
        memory = self._make_gauge(
            "hasten_memory_bytes",
            "Memory of this process: resident on the host, reserved by torch on the device.",
            "kind",
        )
        for kind_name, size in reading.memory_bytes.items():
            memory.add_metric([*self._labels.values(), kind_name], size)
        yield memory
        times = self._make_gauge(
            "hasten_time_seconds", "Wall time of the process by cause.", "cause"
        )
        for cause, seconds in reading.seconds.items():
            times.add_metric([*self._labels.values(), cause], seconds)
        yield times

    def _make_gauge(self, name: str, text: str, *labels: str) -> GaugeMetricFamily:
        return GaugeMetricFamily(name, text, labels=[*self._labels, *labels])


def serve_metrics(
    host: str, port: int, collector: RankCollector
) -> ThreadingWSGIServer:
    """Start a server of the metrics in a thread. Raises: OSError or OverflowError for a port that cannot be used."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)
    server, thread = start_http_server(port, host, registry)
    thread.name = "hasten-metrics"
    return cast(ThreadingWSGIServer, server)
