"""The metrics of a rank: their names and help texts, filled from one reading of plain numbers, as Prometheus's text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector, CollectorRegistry


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReading:
    """Numbers of one rank at one moment. None is a number that is not known."""

    facts: Mapping[str, str] = field(default_factory=dict)
    """Labels of the info metric: version, strategy, script."""
    world_size: int = 1
    uptime_s: float
    step: int
    updates: int
    samples: int
    step_age_s: float
    loss: float | None = None
    grad_norm: float | None = None
    tokens_per_second: float | None = None
    mfu: float | None = None
    memory_bytes: Mapping[str, int] = field(default_factory=dict)
    """Bytes by kind: host, device."""
    data_wait: float | None = None
    """Share of the wait for data in the last minute of steps."""
    stalls: int = 0
    restarts: int = 0
    skipped: int = 0
    saves: int = 0
    checkpoint_age_s: float | None = None
    checkpoint_s: float | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Wall time of the run by cause."""
    goodput: float | None = None
    replicas_present: float | None = None
    """Replicas of the latest update; None for a run that cannot lose any, as below."""
    replicas_lost: float | None = None
    replicas_joined: float | None = None
    samples_returned: float | None = None
    """Samples of lost replicas that were given out again."""
    replicas_waiting_s: float | None = None


_METRICS: Final[Sequence[tuple[str, str, str]]] = (
    ("hasten_world_size", "world_size", "Number of ranks of the job."),
    ("hasten_step", "step", "Updates of the run, including those before a resume."),
    (
        "hasten_updates_total",
        "updates",
        "Updates of this process, applied and skipped.",
    ),
    (
        "hasten_samples_total",
        "samples",
        "Samples of all batches of training, over all ranks.",
    ),
    ("hasten_loss", "loss", "Last known loss given to backward() on this rank."),
    (
        "hasten_grad_norm",
        "grad_norm",
        "Last known norm that clip_grad_norm_() returned.",
    ),
    (
        "hasten_tokens_per_second",
        "tokens_per_second",
        "Tokens a second over all ranks, after track_throughput().",
    ),
    (
        "hasten_mfu_ratio",
        "mfu",
        "Share of the devices' peak, after track_throughput().",
    ),
    ("hasten_data_wait_ratio", "data_wait", "Share of data wait in the last minute."),
    ("hasten_uptime_seconds", "uptime_s", "Seconds since the start of the process."),
    (
        "hasten_last_step_age_seconds",
        "step_age_s",
        "Seconds since the last update, or since the start before the first.",
    ),
    ("hasten_stalls_total", "stalls", "Stalls that this rank's watchdog reported."),
    ("hasten_restarts_total", "restarts", "Restarts of the job by its launcher."),
    ("hasten_skipped_updates_total", "skipped", "Updates skipped by this process."),
    ("hasten_checkpoints_total", "saves", "Complete checkpoints of this process."),
    (
        "hasten_checkpoint_age_seconds",
        "checkpoint_age_s",
        "Seconds since the state of the newest checkpoint that this process completed.",
    ),
    (
        "hasten_checkpoint_duration_seconds",
        "checkpoint_s",
        "Seconds of the last complete save, with its writing in the background.",
    ),
    ("hasten_goodput_ratio", "goodput", "Time in useful steps over wall time."),
    (
        "hasten_replicas",
        "replicas_present",
        "Replicas of the latest update, of a run that may lose some.",
    ),
    (
        "hasten_replicas_lost_total",
        "replicas_lost",
        "Replicas that were lost, as seen by this one.",
    ),
    (
        "hasten_replicas_joined_total",
        "replicas_joined",
        "Replicas that have joined, as seen by this one.",
    ),
    (
        "hasten_samples_returned_total",
        "samples_returned",
        "Samples of lost replicas that were given out again.",
    ),
    (
        "hasten_replicas_waiting_seconds",
        "replicas_waiting_s",
        "Seconds of the current wait for replicas.",
    ),
)
"""Names of metrics, fields of the reading, and help texts; counters end in `_total`."""


class RankCollector(Collector):
    """Collector of one reading; `labels` are those of every sample."""

    def __init__(self, reading: RankReading, labels: Mapping[str, str]) -> None:
        self._reading = reading
        self._labels = labels

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics; numbers that are not known are left out."""
        reading = self._reading
        info = GaugeMetricFamily(
            "hasten_info",
            "Facts about the rank.",
            labels=[*self._labels, *reading.facts],
        )
        info.add_metric([*self._labels.values(), *reading.facts.values()], 1.0)
        yield info
        for name, attribute, text in _METRICS:
            if (value := getattr(reading, attribute)) is not None:
                kind = (
                    CounterMetricFamily
                    if name.endswith("_total")
                    else GaugeMetricFamily
                )
                family = kind(name, text, labels=list(self._labels))
                family.add_metric(list(self._labels.values()), value)
                yield family
        text = "Memory of this process: resident on the host, reserved by torch on the device."
        yield self._by_label("hasten_memory_bytes", text, "kind", reading.memory_bytes)
        text = "Wall time of the run by cause, including earlier starts in the same project_dir."
        yield self._by_label("hasten_time_seconds", text, "cause", reading.seconds)

    def _by_label(
        self, name: str, text: str, label: str, values: Mapping[str, float]
    ) -> GaugeMetricFamily:
        family = GaugeMetricFamily(name, text, labels=[*self._labels, label])
        for key, value in values.items():
            family.add_metric([*self._labels.values(), key], value)
        return family


def metrics_text(reading: RankReading, labels: Mapping[str, str]) -> str:
    """Return the metrics of a reading in Prometheus's text format; `labels` are added to every sample."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(RankCollector(reading, labels))
    return generate_latest(registry).decode()
