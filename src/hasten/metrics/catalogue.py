"""The metrics of a rank: their names, units and help texts, filled from one reading of plain numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from hasten.metrics.exposition import MetricFamily, MetricKind, Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaReading:
    """Numbers of a run that continues when replicas are lost, as one replica has seen them."""

    present: int
    lost: int
    joined: int
    returned: int
    """Samples that were given out again."""
    waiting_s: float


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
    replicas: ReplicaReading | None = None
    """Replicas of a run that continues when some are lost; None for other runs."""


def families(reading: RankReading) -> list[MetricFamily]:
    """Return the metric families of a reading; numbers that are not known are left out."""
    return [*_training(reading), *_operations(reading), *_replicas(reading.replicas)]


def _training(reading: RankReading) -> list[MetricFamily]:
    return [
        MetricFamily("hasten_info", "gauge", "Facts about the rank.", [Sample(1.0, reading.facts)]),
        _one("hasten_world_size", "gauge", "Number of ranks of the job.", reading.world_size),
        _one("hasten_step", "gauge", "Updates of the run, including those before a resume.", reading.step),
        _one("hasten_updates_total", "counter", "Updates of this process, applied and skipped.", reading.updates),
        _one("hasten_samples_total", "counter", "Samples of all batches of training, over all ranks.", reading.samples),
        _one("hasten_loss", "gauge", "Last known loss given to backward() on this rank.", reading.loss),
        _one("hasten_grad_norm", "gauge", "Last known norm that clip_grad_norm_() returned.", reading.grad_norm),
        _one(
            "hasten_tokens_per_second",
            "gauge",
            "Tokens a second over all ranks, after track_throughput().",
            reading.tokens_per_second,
        ),
        _one("hasten_mfu_ratio", "gauge", "Share of the devices' peak, after track_throughput().", reading.mfu, "1"),
        _one("hasten_data_wait_ratio", "gauge", "Share of data wait in the last minute.", reading.data_wait, "1"),
        MetricFamily(
            "hasten_memory_bytes",
            "gauge",
            "Memory of this process: resident on the host, reserved by torch on the device.",
            [Sample(float(size), {"kind": kind}) for kind, size in reading.memory_bytes.items()],
            "By",
        ),
    ]


def _operations(reading: RankReading) -> list[MetricFamily]:
    return [
        _one("hasten_uptime_seconds", "gauge", "Seconds since the start of the process.", reading.uptime_s, "s"),
        _one(
            "hasten_last_step_age_seconds",
            "gauge",
            "Seconds since the last update, or since the start before the first.",
            reading.step_age_s,
            "s",
        ),
        _one("hasten_stalls_total", "counter", "Stalls that this rank's watchdog reported.", reading.stalls),
        _one("hasten_restarts_total", "counter", "Restarts of the job by its launcher.", reading.restarts),
        _one("hasten_skipped_updates_total", "counter", "Updates skipped by this process.", reading.skipped),
        _one("hasten_checkpoints_total", "counter", "Complete checkpoints of this process.", reading.saves),
        _one(
            "hasten_checkpoint_age_seconds",
            "gauge",
            "Seconds since the state of the newest checkpoint that this process completed.",
            reading.checkpoint_age_s,
            "s",
        ),
        _one(
            "hasten_checkpoint_duration_seconds",
            "gauge",
            "Seconds of the last complete save, with its writing in the background.",
            reading.checkpoint_s,
            "s",
        ),
        MetricFamily(
            "hasten_time_seconds",
            "gauge",
            "Wall time of the run by cause, including earlier starts in the same project_dir.",
            [Sample(seconds, {"cause": cause}) for cause, seconds in reading.seconds.items()],
            "s",
        ),
        _one("hasten_goodput_ratio", "gauge", "Time in useful steps over wall time.", reading.goodput, "1"),
    ]


def _replicas(seen: ReplicaReading | None) -> list[MetricFamily]:
    present, lost, joined, returned, waiting = (
        (None,) * 5 if seen is None else (seen.present, seen.lost, seen.joined, seen.returned, seen.waiting_s)
    )
    return [
        _one("hasten_replicas", "gauge", "Replicas of the latest update, of a run that may lose some.", present),
        _one("hasten_replicas_lost_total", "counter", "Replicas that were lost, as seen by this one.", lost),
        _one("hasten_replicas_joined_total", "counter", "Replicas that have joined, as seen by this one.", joined),
        _one(
            "hasten_samples_returned_total", "counter", "Samples of lost replicas that were given out again.", returned
        ),
        _one("hasten_replicas_waiting_seconds", "gauge", "Seconds of the current wait for replicas.", waiting, "s"),
    ]


def _one(name: str, kind: MetricKind, text: str, value: float | None, unit: str = "") -> MetricFamily:
    return MetricFamily(name, kind, text, [] if value is None else [Sample(float(value))], unit)
