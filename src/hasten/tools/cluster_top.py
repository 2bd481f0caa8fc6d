"""`hasten top --from`: the table of a job on several machines, from the metrics of its ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from hasten.metrics.scrape import Scrape, ScrapeCredentials, ScrapeTarget, scrape_all

_AGE: Final = 30.0
"""Seconds over which the rate of steps is computed."""


@dataclass(slots=True)
class RankRow:
    """Metrics of one rank, by name without the prefix; several samples of a name by their own label."""

    job: str
    rank: int
    machine: str
    values: dict[str, float] = field(default_factory=dict)
    memory: dict[str, float] = field(default_factory=dict)
    causes: dict[str, float] = field(default_factory=dict)
    world_size: int = 0
    steps_per_s: float | None = None

    def as_json(self) -> dict[str, Any]:  # Any: JSON values
        """Return the row as JSON values."""
        return {
            "job": self.job,
            "rank": self.rank,
            "machine": self.machine,
            "world_size": self.world_size,
            "steps_per_s": self.steps_per_s,
            **self.values,
            "memory_bytes": self.memory,
            "time_seconds": self.causes,
        }


def row_of(scrape: Scrape) -> RankRow | None:
    """Return the metrics of one answer; None if they are not those of a rank."""
    row: RankRow | None = None
    for sample in scrape.samples:
        labels = sample.labels
        if not sample.name.startswith("hasten_") or not labels.get("rank", "").isdigit():
            continue
        if row is None:
            row = RankRow(labels.get("job", ""), int(labels["rank"]), labels.get("machine", ""))
        match sample.name.removeprefix("hasten_"):
            case "info":
                continue
            case "world_size":
                row.world_size = int(sample.value)
            case "memory_bytes":
                row.memory[labels.get("kind", "")] = sample.value
            case "time_seconds":
                row.causes[labels.get("cause", "")] = sample.value
            case name:
                row.values[name] = sample.value
    return row


class StepRates:
    """Steps a second of each target, from the counts of its last answers."""

    def __init__(self) -> None:
        self._seen: dict[ScrapeTarget, list[tuple[float, float]]] = {}

    def add(self, scrape: Scrape, row: RankRow) -> None:
        """Add an answer, and set the rate of its row once there are two of the same process."""
        count = row.values.get("updates_total", 0.0)
        seen = self._seen.setdefault(scrape.target, [])
        if seen and count < seen[-1][1]:  # the process was restarted
            seen.clear()
        seen.append((scrape.at_s, count))
        while len(seen) > 2 and scrape.at_s - seen[0][0] > _AGE:
            del seen[0]
        if len(seen) > 1:
            row.steps_per_s = (count - seen[0][1]) / max(scrape.at_s - seen[0][0], 1e-3)


def _number(form: str) -> Callable[[float], str]:
    return form.format


def _ago(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min {rest} s"


def _size(size: float) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"


_COLUMNS: Final = MappingProxyType[str, tuple[str, Callable[[float], str]]](
    {
        "loss": ("loss", _number("{:.4g}")),
        "grad_norm": ("norm", _number("{:.3g}")),
        "tokens_per_second": ("tok/s", _number("{:,.0f}")),
        "mfu_ratio": ("mfu", _number("{:.1%}")),
        "data_wait_ratio": ("data wait", _number("{:.0%}")),
        "last_step_age_seconds": ("last step", _ago),
        "checkpoint_age_seconds": ("checkpoint", _ago),
        "goodput_ratio": ("goodput", _number("{:.1%}")),
    }
)
"""Heading and format of each value; a column without values is left out."""


_LONG_WAIT_S: Final = 2.0
"""Seconds of waiting for replicas from which it is shown."""
_LEAST_NEEDED: Final = ("grad_norm", "memory", "checkpoint_age_seconds", "mfu_ratio", "goodput_ratio", "loss")
"""Columns that are left out one after the other where the terminal is too narrow."""


def page(console: Console, rows: Sequence[RankRow], silent: Sequence[Scrape]) -> RenderableType:
    """Return the tables of all jobs, and the targets without an answer, for the width of a console."""
    parts: list[RenderableType] = []
    wide = console.options.update(max_width=1000)
    for job in sorted({row.job for row in rows}):
        ranks = sorted((row for row in rows if row.job == job), key=lambda row: row.rank)
        grid = _table(job, ranks, ())
        for number in range(1, len(_LEAST_NEEDED) + 1):
            if Measurement.get(console, wide, grid).maximum <= console.width:
                break
            grid = _table(job, ranks, _LEAST_NEEDED[:number])
        parts += [grid, Text(_summary(ranks))]
    if silent:
        parts.append(Text(f"{len(silent)} targets without metrics", style="bold"))
        parts += [Text(f"  {one.target}: {one.error or 'not the metrics of a rank'}") for one in silent[:20]]
        if len(silent) > 20:
            parts.append(Text(f"  … and {len(silent) - 20} more"))
    return Group(*parts)


def _table(job: str, rows: Sequence[RankRow], left_out: Sequence[str]) -> Table:
    machines = len({row.machine for row in rows})
    world = max(row.world_size for row in rows)
    uptime = max(row.values.get("uptime_seconds", 0.0) for row in rows)
    places = f"{machines} machine{'s' if machines > 1 else ''}"
    title = f"{job} on {places}: {len(rows)} of {world or len(rows)} ranks, for {_ago(uptime)}"
    grid = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), title=title, title_justify="left")
    shown = [name for name in _COLUMNS if name not in left_out and any(name in row.values for row in rows)]
    memory = [] if "memory" in left_out else list(dict.fromkeys(kind for row in rows for kind in row.memory))
    for heading in ("machine", "rank", "step", "steps/s", *(_COLUMNS[name][0] for name in shown), *memory):
        grid.add_column(heading, justify="left" if heading == "machine" else "right", no_wrap=True)
    for row in rows:
        grid.add_row(
            row.machine,
            str(row.rank),
            f"{row.values.get('step', 0):.0f}",
            "" if row.steps_per_s is None else f"{row.steps_per_s:.2f}",
            *(_COLUMNS[name][1](row.values[name]) if name in row.values else "" for name in shown),
            *(_size(row.memory[kind]) if kind in row.memory else "" for kind in memory),
        )
    return grid


def _summary(rows: Sequence[RankRow]) -> str:
    """Return the goodput of the job with its largest losses, and the counts of incidents."""
    lowest = min(rows, key=lambda row: row.values.get("goodput_ratio", 1.0))
    wall = max(sum(lowest.causes.values()), 1e-9)
    losses = sorted(((s, cause) for cause, s in lowest.causes.items() if cause != "useful" and s > 0), reverse=True)
    words = [f"{cause} {seconds / wall:.1%}" for seconds, cause in losses[:5]]
    counts = {
        name: int(max(row.values.get(f"{key}_total", 0.0) for row in rows))
        for key, name in (("stalls", "stalls"), ("restarts", "restarts"), ("skipped_updates", "skipped updates"))
    }
    goodput = lowest.values.get("goodput_ratio")
    first = [] if goodput is None else [f"goodput {goodput:.1%} (rest: {', '.join(words) or 'nothing'})"]
    return "; ".join([*first, *(f"{number} {name}" for name, number in counts.items()), *_replicas(rows)])


def _replicas(rows: Sequence[RankRow]) -> list[str]:
    """Return the words about replicas of a run that continues when some are lost; none for other runs."""
    return replica_words(
        [
            {name.removesuffix("_total").replace("_seconds", "_s"): value for name, value in row.values.items()}
            for row in rows
            if "replicas" in row.values
        ]
    )


def replica_words(known: Sequence[Mapping[str, float]]) -> list[str]:
    """Return the words about the replicas that these ranks have seen: one that was started again has seen fewer events than the others."""
    if not known:
        return []
    present, lost, joined, returned = (
        int(max(one.get(name, 0.0) for one in known))
        for name in ("replicas", "replicas_lost", "replicas_joined", "samples_returned")
    )
    words = [f"{present} replicas, {lost} lost, {joined} joined, {returned} samples given out again"]
    waiting = min(one.get("replicas_waiting_s", 0.0) for one in known)
    return words + ([f"all wait for replicas since {waiting:.0f} s"] if waiting >= _LONG_WAIT_S else [])


def look(
    targets: Sequence[ScrapeTarget], proof: ScrapeCredentials, rates: StepRates
) -> tuple[list[RankRow], list[Scrape]]:
    """Return the rows of all ranks that answered, and the other answers."""
    rows, silent = [], []
    for scrape in scrape_all(targets, proof):
        row = row_of(scrape)
        if row is None:
            silent.append(scrape)
        else:
            rates.add(scrape, row)
            rows.append(row)
    return rows, silent


def once(
    targets: Sequence[ScrapeTarget], proof: ScrapeCredentials, interval_s: float
) -> tuple[list[RankRow], list[Scrape]]:
    """Return two looks' result: rates need two."""
    rates = StepRates()
    look(targets, proof, rates)
    time.sleep(interval_s)
    return look(targets, proof, rates)


def follow(console: Console, targets: Sequence[ScrapeTarget], proof: ScrapeCredentials, interval_s: float) -> None:
    """Redraw the tables until the user presses Ctrl-C. Ranks that end are shown as targets without metrics."""
    rates = StepRates()
    with Live(console=console, auto_refresh=False) as live:
        try:
            while True:
                live.update(page(console, *look(targets, proof, rates)), refresh=True)
                time.sleep(max(interval_s, 0.1))
        except KeyboardInterrupt:  # the way to leave a live table
            return


def as_json(rows: Sequence[RankRow], silent: Sequence[Scrape]) -> Mapping[str, Any]:  # Any: JSON values
    """Return the state of all ranks as JSON values."""
    ordered = sorted(rows, key=lambda row: (row.job, row.rank))
    return {
        "ranks": [row.as_json() for row in ordered],
        "silent": [{"target": str(one.target), "error": one.error} for one in silent],
    }
