"""Tracker without dependencies: one JSON object per line, images as PNG files beside them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any, Final

import msgspec

from hasten.tracking.base import Entry, ImageEntry, Run, Scalar, TableEntry, Tracker
from hasten.tracking.values import encode_png

_WORDS: Final = MappingProxyType(
    {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
)


class JsonlTracker(Tracker):
    """Tracker that writes `<directory>/<project>/<run id>/metrics.jsonl`, one line per `log`, and `config.json`."""

    name = "jsonl"

    def __init__(self) -> None:
        self._file: IO[bytes] | None = None
        self._folder = Path()

    @property
    def native(self) -> Path:
        """The folder of the run."""
        return self._folder

    def start(self, run: Run) -> str:
        """Open the run's file for appending; on a resume, mark the step from which it continues."""
        self._folder = run.directory / run.project / run.run_id
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / "metrics.jsonl"
        has_torn_line = (
            path.exists()
            and not path.read_bytes().endswith(b"\n")
            and path.stat().st_size > 0
        )
        self._file = path.open("ab")
        if has_torn_line:  # the last run died in the middle of a line
            self._file.write(b"\n")
        (self._folder / "config.json").write_text(
            json.dumps(run.shown_config, indent=2) + "\n", encoding="utf-8"
        )
        if run.resume:
            self.rewind(run.resume.step)
        self._file.flush()
        return run.run_id

    def log(self, entry: Entry) -> None:
        """Write one line with step, time and values."""
        logged_values = {}
        for value_name, logged_value in entry.values.items():
            logged_values[value_name] = _json_safe(logged_value)
        self._write_line(
            step=entry.step,
            time=entry.time_s,
            values=logged_values,
        )

    def log_images(self, entry: ImageEntry) -> None:
        """Write every image as a PNG file and one line with their names."""
        names: dict[str, list[str]] = {}
        for name, images in entry.images.items():
            folder = self._folder / "images" / name
            folder.mkdir(parents=True, exist_ok=True)
            for index, image in enumerate(images):
                path = folder / f"{entry.step:08d}_{index}.png"
                path.write_bytes(encode_png(image))
                names.setdefault(name, []).append(
                    path.relative_to(self._folder).as_posix()
                )
        self._write_line(step=entry.step, time=entry.time_s, images=names)

    def log_table(self, entry: TableEntry) -> None:
        """Write the table as one line."""
        value_rows = [list(map(_json_safe, row)) for row in entry.rows]
        self._write_line(
            step=entry.step,
            time=entry.time_s,
            table={
                "name": entry.name,
                "columns": list(entry.columns),
                "rows": value_rows,
            },
        )

    def rewind(self, step: int) -> None:
        """Mark that later lines replace those after `step`."""
        self._write_line(rewind=step)

    def flush(self) -> None:
        """Flush the lines to the operating system."""
        if self._file is not None:
            self._file.flush()

    def finish(self, failed: bool) -> None:
        """Write the last line and close the file."""
        if self._file is not None:
            self._write_line(finished="failed" if failed else "ok")
            self._file.close()
            self._file = None

    def _write_line(self, **record: Any) -> None:
        assert self._file is not None, "start() opens the file"
        self._file.write(msgspec.json.encode(record) + b"\n")


def _json_safe(value: Scalar | None) -> Scalar | None:
    """Return the value with NaN and infinities as words, since JSON does not have them."""
    if isinstance(value, float) and not math.isfinite(value):
        if math.isnan(value):
            return "NaN"
        if value > 0:
            return "Infinity"
        return "-Infinity"
    return value


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """Return the curve in a metrics file or its run folder: one dict per `log`, with "step" and "time".

    Steps repeated after a resume appear once, with their later values.
    """
    path = Path(path)
    path = path / "metrics.jsonl" if path.is_dir() else path
    value_rows: list[dict[str, Any]] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            record: Mapping[str, Any] = json.loads(line)
        # a line truncated when its process died, never complete
        except json.JSONDecodeError:
            continue
        if "rewind" in record:
            value_rows = [row for row in value_rows if row["step"] <= record["rewind"]]
        elif "values" in record:
            values = {}
            for value_name, logged_value in record["values"].items():
                if isinstance(logged_value, str):
                    logged_value = _WORDS.get(logged_value, logged_value)
                values[value_name] = logged_value
            value_rows.append(
                {**values, "step": record["step"], "time": record["time"]}
            )
    return value_rows
