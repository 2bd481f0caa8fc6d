"""What the replicas under test have written: a row for each update, and a result."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]


def results(folder: Path) -> dict[str, Row]:
    """Return what the replicas that reached the end have written, by name."""
    return {
        path.stem.removeprefix("result-"): json.loads(path.read_text())
        for path in folder.glob("result-*.json")
    }


def rows(folder: Path) -> list[dict[str, Any]]:
    """Return all rows of all processes; the last line of a killed one may be incomplete."""
    rows_of_all = []
    for path in folder.glob("replica-*.jsonl"):
        name = path.stem.split("-")[1]
        for line in path.read_text().splitlines():
            if line.endswith("}"):
                rows_of_all.append(json.loads(line) | {"name": name})
    return rows_of_all
