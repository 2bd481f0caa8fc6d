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
        times = []
        for rank_log in self.ranks:
            if rank_log.started:
                times.append(float(rank_log.started["time"]))
        for curve in self.curves.values():
            if len(curve.times):
                times.append(float(curve.times.min()))
        return min(times, default=0.0)

    @property
    def _latest_start(self) -> Mapping[str, Any]:
        for rank_log in reversed(self.ranks):
            if rank_log.rank == 0 and rank_log.started:
                return rank_log.started
        return {}

    @property
    def settings(self) -> dict[str, tuple[str, str]]:
        """Name -> value and source: the Accelerator's settings, then those of the tracker."""
        settings_by_name = {}
        for name, value in self.config.items():
            settings_by_name[name] = (str(value), "given to init_trackers")
        settings = self._latest_start.get("settings", {})
        for name, (value, source) in settings.items():
            settings_by_name[name] = (str(masked_value(name, value)), source)
        return settings_by_name

    @property
    def environment(self) -> dict[str, str]:
        """Machine and package versions, as of the latest start."""
        started_event = self._latest_start
        facts_by_name = {}
        for name in ("command", "strategy", "world_size", "device", "host"):
            if started_event.get(name) is not None:
                facts_by_name[name] = masked(str(started_event[name]))
        for package_name, version in started_event.get("versions", {}).items():
            facts_by_name[str(package_name)] = str(version)
        return facts_by_name

    @property
    def events(self) -> list[dict[str, Any]]:
        """Events of the main process, by time; starts after the first are called restarts."""
        logged_events: list[dict[str, Any]] = []
        main_logs = [rank_log for rank_log in self.ranks if rank_log.rank == 0]
        for number, rank_log in enumerate(main_logs):
            for event in rank_log.events:
                kind = event.get("event", "")
                if number and kind == "started":
                    kind = "restarted"
                time_s = float(event.get("time", 0.0))
                shown_event = {"event": kind, "time": time_s}
                for key in ("seconds", "error", "words"):
                    if key in event:
                        shown_event |= masked_tree({key: event[key]})
                logged_events.append(shown_event)
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
        for value_name, curve in _read_curves(records).items():
            curves[f"{value_name}{suffix}"] = curve
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
    paths: set[Path] = set()
    for depth in _DEPTH:
        paths.update(root.glob(f"{depth}metrics.jsonl"))
    return sorted(paths)


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
            last_step = record["rewind"]
            logged_records = [row for row in logged_records if row["step"] <= last_step]
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
    return {name: _curve_of(points) for name, points in points_by_name.items()}


def _curve_of(points: list[tuple[int, float, float]]) -> Curve:
    table = np.array(points, dtype=np.float64)
    return Curve(table[:, 0].astype(np.int64), table[:, 1], table[:, 2])


def _flatten_config(tree: Any, prefix: str = "") -> list[tuple[str, Any]]:
    if not isinstance(tree, dict):
        return [(prefix, tree)]
    flat_config = []
    for key, subtree in tree.items():
        flat_config += _flatten_config(subtree, f"{prefix}.{key}" if prefix else key)
    return flat_config
