"""Contents of a run's folder: curves of metrics, step times, events, settings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from hasten.config.masking import masked, masked_tree, masked_value
from hasten.errors import ConfigError
from hasten.tracking.run_log import FOLDER, LoggedRank, read_run_log

_WORDS: Final = MappingProxyType(
    {"NaN": float("nan"), "Infinity": float("inf"), "-Infinity": float("-inf")}
)
_DEPTH: Final = ("", "*/", "*/*/", "*/*/*/")

# Any in this file: settings and events are JSON values.


@dataclass(frozen=True, slots=True)
class Curve:
    """A metric over steps and time."""

    steps: NDArray[np.int64]
    times: NDArray[np.float64]
    values: NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Contents of the folder of one run, including restarts."""

    name: str
    curves: Mapping[str, Curve] = field(default_factory=dict)
    ranks: tuple[LoggedRank, ...] = ()
    config: Mapping[str, Any] = field(default_factory=dict)
    """The config passed to `init_trackers`, flattened, with credentials masked."""

    @property
    def began_s(self) -> float:
        """Start of the run, in seconds since 1970."""
        times = [
            float(rank_log.started["time"])
            for rank_log in self.ranks
            if rank_log.started
        ]
        times += [
            float(curve.times.min())
            for curve in self.curves.values()
            if len(curve.times)
        ]
        return min(times, default=0.0)

    @property
    def settings(self) -> dict[str, tuple[str, str]]:
        """Name -> value and source: the Accelerator's settings, then those of the tracker."""
        settings_by_name = {
            value_name: (str(value), "given to init_trackers")
            for value_name, value in self.config.items()
        }
        started_event = next(
            (
                rank_log.started
                for rank_log in reversed(self.ranks)
                if rank_log.rank == 0 and rank_log.started
            ),
            {},
        )
        settings_by_name |= {
            value_name: (str(masked_value(value_name, value)), source)
            for value_name, (value, source) in started_event.get("settings", {}).items()
        }
        return settings_by_name

    @property
    def environment(self) -> dict[str, str]:
        """Machine and package versions, as of the latest start."""
        started_event = next(
            (
                rank_log.started
                for rank_log in reversed(self.ranks)
                if rank_log.rank == 0 and rank_log.started
            ),
            {},
        )
        plain = {
            value_name: started_event.get(value_name)
            for value_name in ("command", "strategy", "world_size", "device", "host")
        }
        facts_by_name = {
            value_name: masked(str(value))
            for value_name, value in plain.items()
            if value is not None
        }
        return facts_by_name | {
            str(value_name): str(value)
            for value_name, value in started_event.get("versions", {}).items()
        }

    @property
    def events(self) -> list[dict[str, Any]]:
        """Events of the main process, by time; starts after the first are called restarts."""
        logged_events: list[dict[str, Any]] = []
        for number, rank_log in enumerate(
            rank_log for rank_log in self.ranks if rank_log.rank == 0
        ):
            for event in rank_log.events:
                if number and event.get("event") == "started":
                    kind = "restarted"
                else:
                    kind = event.get("event", "")
                details: dict[str, Any] = masked_tree(
                    {
                        key: event[key]
                        for key in ("seconds", "error", "words")
                        if key in event
                    }
                )
                logged_events.append(
                    {"event": kind, "time": float(event.get("time", 0.0)), **details}
                )
        return sorted(logged_events, key=lambda event: float(event["time"]))


def read_run(folder: str | Path) -> RunFolder:
    """Read everything about the run in a folder.

    Raises: ConfigError if the folder holds neither metrics nor a run log.
    """
    root = Path(folder)
    logs = tuple(read_run_log(root / FOLDER)) if (root / FOLDER).is_dir() else ()
    files = _metrics_files(root)
    if not logs and not files:
        raise ConfigError(
            f"{folder} contains neither {FOLDER}/ nor a metrics.jsonl, so there is nothing to report; give the project_dir of a "
            "training, or log with log_with='jsonl'."
        )
    curves: dict[str, Curve] = {}
    config: dict[str, Any] = {}
    for path in files:
        suffix = "" if len(files) == 1 else f" ({path.parent.name})"
        records = _read_records(path)
        curves |= {
            f"{value_name}{suffix}": curve
            for value_name, curve in _read_curves(records).items()
        }
        settings = path.with_name("config.json")
        if settings.exists():
            config |= dict(
                _flatten_config(masked_tree(msgspec.json.decode(settings.read_bytes())))
            )
    return RunFolder(
        root.name or str(root.resolve().name),
        curves,
        logs,
        config,
    )


def _metrics_files(root: Path) -> list[Path]:
    return sorted(
        {path for depth in _DEPTH for path in root.glob(f"{depth}metrics.jsonl")}
    )


def _read_records(path: Path) -> list[dict[str, Any]]:
    """Return the records of a file that have a step; steps repeated after a resume appear once, with their later records."""
    decoder = msgspec.json.Decoder()
    logged_records: list[dict[str, Any]] = []
    for line in path.read_bytes().splitlines():
        try:
            record = decoder.decode(line)
        except msgspec.DecodeError:  # truncated when its process died
            continue
        if "rewind" in record:
            logged_records = [
                row for row in logged_records if row["step"] <= record["rewind"]
            ]
        elif "step" in record:
            logged_records.append(record)
    return logged_records


def _read_curves(records: Iterable[Mapping[str, Any]]) -> dict[str, Curve]:
    points_by_name: dict[str, list[tuple[int, float, float]]] = {}
    for record in records:
        for value_name, value in record.get("values", {}).items():
            number = _WORDS.get(value) if isinstance(value, str) else value
            if isinstance(number, (int, float)) and not isinstance(number, bool):
                points_by_name.setdefault(value_name, []).append(
                    (record["step"], record["time"], float(number))
                )
    return {
        value_name: _curve_of(points) for value_name, points in points_by_name.items()
    }


def _curve_of(points: list[tuple[int, float, float]]) -> Curve:
    table = np.array(points, dtype=np.float64)
    return Curve(table[:, 0].astype(np.int64), table[:, 1], table[:, 2])


def _flatten_config(tree: Any, prefix: str = "") -> list[tuple[str, Any]]:
    if not isinstance(tree, dict):
        return [(prefix, tree)]
    return [
        pair
        for key, value in tree.items()
        for pair in _flatten_config(value, f"{prefix}.{key}" if prefix else str(key))
    ]
