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
        times = [float(log.started["time"]) for log in self.ranks if log.started]
        times += [
            float(curve.times.min())
            for curve in self.curves.values()
            if len(curve.times)
        ]
        return min(times, default=0.0)

    @property
    def settings(self) -> dict[str, tuple[str, str]]:
        """Name -> value and source: the Accelerator's settings, then those of the tracker."""
        found = {
            name: (str(value), "given to init_trackers")
            for name, value in self.config.items()
        }
        started = next(
            (
                log.started
                for log in reversed(self.ranks)
                if log.rank == 0 and log.started
            ),
            {},
        )
        found |= {
            name: (str(masked_value(name, value)), source)
            for name, (value, source) in started.get("settings", {}).items()
        }
        return found

    @property
    def environment(self) -> dict[str, str]:
        """Machine and package versions, as of the latest start."""
        started = next(
            (
                log.started
                for log in reversed(self.ranks)
                if log.rank == 0 and log.started
            ),
            {},
        )
        plain = {
            name: started.get(name)
            for name in ("command", "strategy", "world_size", "device", "host")
        }
        found = {
            name: masked(str(value))
            for name, value in plain.items()
            if value is not None
        }
        return found | {
            str(name): str(value) for name, value in started.get("versions", {}).items()
        }

    @property
    def events(self) -> list[dict[str, Any]]:
        """Events of the main process, by time; starts after the first are called restarts."""
        found: list[dict[str, Any]] = []
        for number, log in enumerate(log for log in self.ranks if log.rank == 0):
            for event in log.events:
                kind = (
                    "restarted"
                    if number and event.get("event") == "started"
                    else event.get("event", "")
                )
                details: dict[str, Any] = masked_tree(
                    {
                        key: event[key]
                        for key in ("seconds", "error", "words")
                        if key in event
                    }
                )
                found.append(
                    {"event": kind, "time": float(event.get("time", 0.0)), **details}
                )
        return sorted(found, key=lambda event: float(event["time"]))


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
        records = _records(path)
        curves |= {f"{name}{suffix}": curve for name, curve in _curves(records).items()}
        settings = path.with_name("config.json")
        if settings.exists():
            config |= dict(
                _flat(masked_tree(msgspec.json.decode(settings.read_bytes())))
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


def _records(path: Path) -> list[dict[str, Any]]:
    """Return the records of a file that have a step; steps repeated after a resume appear once, with their later records."""
    decoder = msgspec.json.Decoder()
    rows: list[dict[str, Any]] = []
    for line in path.read_bytes().splitlines():
        try:
            record = decoder.decode(line)
        except msgspec.DecodeError:  # truncated when its process died
            continue
        if "rewind" in record:
            rows = [row for row in rows if row["step"] <= record["rewind"]]
        elif "step" in record:
            rows.append(record)
    return rows


def _curves(records: Iterable[Mapping[str, Any]]) -> dict[str, Curve]:
    found: dict[str, list[tuple[int, float, float]]] = {}
    for record in records:
        for name, value in record.get("values", {}).items():
            number = _WORDS.get(value) if isinstance(value, str) else value
            if isinstance(number, (int, float)) and not isinstance(number, bool):
                found.setdefault(name, []).append(
                    (record["step"], record["time"], float(number))
                )
    return {name: _curve(points) for name, points in found.items()}


def _curve(points: list[tuple[int, float, float]]) -> Curve:
    table = np.array(points, dtype=np.float64)
    return Curve(table[:, 0].astype(np.int64), table[:, 1], table[:, 2])


def _flat(tree: Any, prefix: str = "") -> list[tuple[str, Any]]:
    if not isinstance(tree, dict):
        return [(prefix, tree)]
    return [
        pair
        for key, value in tree.items()
        for pair in _flat(value, f"{prefix}.{key}" if prefix else str(key))
    ]
