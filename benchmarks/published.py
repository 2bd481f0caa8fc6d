"""The tables of measured numbers in README.md and docs/, made from benchmarks/results, and the commit behind each.

    python benchmarks/published.py           # list every table: benchmark, runs, commits, and what has changed since
    python benchmarks/published.py --write   # write the tables into the pages, between their marks

A page marks the place of a table with `<!-- measured: NAME -->` and `<!-- end -->`; tests/arch/test_published_numbers.py fails when
what stands between differs from the results. `make bench-ledger` runs the first form.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recording import read_runs

ROOT = Path(__file__).parents[1]
Run = dict[str, Any]


@dataclass(frozen=True)
class Table:
    """One published table: its page, the runs it is made from, and the code whose change makes it doubtful."""

    name: str
    page: str
    benchmark: str
    setting: str
    code: tuple[str, ...]
    """Folders of src/hasten that the measured code lies in."""
    make: Callable[[list[Run]], list[str]]
    most_runs: int = 1
    also: tuple[tuple[str, str], ...] = ()
    """Further benchmarks and settings, of each the newest run."""

    def runs(self) -> list[Run]:
        """Return the newest runs under the setting, oldest first."""
        newest_runs = [
            run for run in read_runs(self.benchmark) if run["setting"] == self.setting
        ][-self.most_runs :]
        for benchmark, setting in self.also:
            newest_runs.append(
                [run for run in read_runs(benchmark) if run["setting"] == setting][-1]
            )
        return newest_runs

    def names(self) -> list[str]:
        """Return the benchmark of each run."""
        return [self.benchmark] * (len(self.runs()) - len(self.also)) + [
            name for name, _ in self.also
        ]

    def text(self) -> str:
        """Return the table as Markdown."""
        return "\n".join(self.make(self.runs()))


def format_rows(header: list[str], *lines: list[str]) -> list[str]:
    """Return a Markdown table."""
    return [
        f"| {' | '.join(cells)} |" for cells in (header, ["---"] * len(header), *lines)
    ]


# -- the loop ---------------------------------------------------------------------------------------------------------
LOOPS = ("fp32", "accumulation 4", "bf16", "fp16", "fp32, clipping")


def format_ratios(runs: list[Run], case: str, contender: str, workers: int = 0) -> str:
    """Return the ratio to bare torch of each run."""
    run_ratios = [
        row["contenders"][contender]["ratio"]
        for run in runs
        for row in run["found"]["loops"]
        if row["case"] == case
        and row["workers"] == workers
        and contender in row["contenders"]
    ]
    return "; ".join(f"{ratio:.2f}" for ratio in run_ratios) or "–"


def loop_table(runs: list[Run]) -> list[str]:
    contenders = ("hasten", "Accelerate", "Fabric")
    return format_rows(
        ["× bare torch", "hasten", "Accelerate 1.15", "Fabric 2.6"],
        *(
            [case, *(format_ratios(runs, case, name) for name in contenders)]
            for case in LOOPS
        ),
    )


def loop_cpu(runs: list[Run]) -> list[str]:
    return format_rows(
        ["× bare torch", "no workers", "2 workers", "4 workers"],
        *(
            [
                case,
                *(
                    format_ratios(runs, case, "hasten", workers)
                    for workers in (0, 2, 4)
                ),
            ]
            for case in LOOPS
        ),
    )


def input_bound(runs: list[Run]) -> list[str]:
    measurements = runs[-1]["found"]["input_bound"]
    names = ("hasten", "bare torch", "Accelerate", "Fabric", "bare torch, side stream")
    size, copy, compute = (
        measurements[key]
        for key in ("batch (MB)", "copy alone (ms)", "compute alone (ms)")
    )
    return format_rows(
        [
            f"a step with batches of {size:.0f} MB (copy {copy:.1f} ms, compute {compute:.1f} ms)",
            *names,
        ],
        ["milliseconds", *(f"{measurements[f'{name} (ms)']:.2f}" for name in names)],
    )


# -- checkpoints and big models ---------------------------------------------------------------------------------------
SYNCED = {
    "hasten": "hasten",
    "torch": "torch synced",
    "Accelerate": "accelerate synced",
}
"""The ways to save that leave the bytes on the disk."""


def checkpoint_table(runs: list[Run]) -> list[str]:
    ways = {row["way"]: row for row in runs[-1]["found"]["ways"]}
    size = max(row["gigabytes"] for row in ways.values())
    lines = []
    for name, save_way in SYNCED.items():
        row = ways[save_way]
        checked = ", every byte verified" if name == "hasten" else ""
        first = f"{row['loads'][0]:.1f} s"
        lines.append(
            [name, f"{row['save_s']:.1f} s", first, f"{row['load_s']:.1f} s{checked}"]
        )
    return format_rows(
        [
            f"{size:.1f} GB",
            "save, synced to the disk",
            "first load after it",
            "load, median",
        ],
        *lines,
    )


def big_models(runs: list[Run]) -> list[str]:
    offload_rows = {
        (row["part"], row["what"]): row for row in runs[-1]["found"]["rows"]
    }
    forward, peer = (
        offload_rows[("cpu forward", "hasten")],
        offload_rows[("cpu forward", "Accelerate")],
    )
    return format_rows(
        ["", "hasten", "Accelerate"],
        [
            f"forward of {forward['GB']:.0f} GB of weights in host memory (the link alone needs {forward['limit_s']:.2f} s)",
            f"{forward['seconds']:.2f} s",
            f"{peer['seconds']:.2f} s",
        ],
    )


def cold_loads(runs: list[Run]) -> list[str]:
    measurements = runs[-1]["found"]
    names = list(measurements["medians"])
    size, rounds = measurements["gigabytes"], measurements["rounds"]
    return format_rows(
        [
            f"load {size:.1f} GB of safetensors to the device, {rounds} round{'s' * (rounds > 1)}",
            *names,
        ],
        *(
            [where, *(f"{measurements['medians'][name][key]:.2f} s" for name in names)]
            for where, key in (
                ("from the disk", "cold_s"),
                ("from the page cache", "warm_s"),
            )
        ),
    )


def sharding_table(runs: list[Run]) -> list[str]:
    measurements = runs[-1]["found"]
    table = {row["row"]: row for row in measurements["table"]}
    plain = table["plain"]["ms"]
    lines = [
        [
            "FSDP2, world of one, in turns with the plain model",
            f"{measurements['beside']['ratio']:.2f} ×",
            "–",
        ]
    ]
    for name, row in table.items():
        if name not in ("FSDP2", "FSDP2, parameters kept after forward"):
            lines.append(
                [name, f"{row['ms'] / plain:.2f} ×", f"{row['peak_gib']:.1f} GiB"]
            )
    return format_rows(
        ["355 M parameters, bf16", "time of a step", "peak memory"], *lines
    )


def offload_training(runs: list[Run]) -> list[str]:
    measurements = runs[-1]["found"]
    equal = {True: "yes", False: "no", None: "–"}
    lines = []
    for row in measurements["rows"]:
        label = f"`{row['way']}`" if "=" in row["way"] else row["way"]
        lines.append(
            [
                label,
                f"{row['ratio']:.2f} ×",
                f"{row['peak_gib']:.1f} GiB",
                equal[row["equal"]],
            ]
        )
    header = [
        f"{measurements['parameters'] / 1e9:.1f} billion parameters, bf16, {measurements['tokens']:,} tokens a step"
    ]
    return format_rows(
        [*header, "time of a step", "peak memory", "bit for bit"], *lines
    )


def language_models(runs: list[Run]) -> list[str]:
    """Return speed, memory and losses of each contender, for each model."""
    lines = []
    for run in runs:
        if products := run["found"].get("products"):
            speed, ratio = (
                products["tokens a second"],
                products["times compiled by hand"],
            )
            cells = [
                f"{speed / 1e3:.1f} ({ratio:.2f} ×)",
                f"{products['mfu']:.0%}",
                "–",
                "–",
            ]
            lines.append(
                [f"{run['found']['model']}: the products of matrices alone", *cells]
            )
        for name, row in run["found"]["rows"].items():
            speed = f"{row['tokens a second'] / 1e3:.1f} ({row['times compiled by hand']:.2f} ×)"
            memory, losses = f"{row['peak GiB']:.1f} GiB", f"{row['losses apart']:.0e}"
            lines.append(
                [
                    f"{run['found']['model']}: {name}",
                    speed,
                    f"{row['mfu']:.0%}",
                    memory,
                    losses,
                ]
            )
    return format_rows(
        [
            "",
            "thousand tokens a second (× compiled by hand)",
            "MFU",
            "peak memory",
            "losses apart",
        ],
        *lines,
    )


def headline_table(runs: list[Run]) -> list[str]:
    loops, checkpoint, offload = runs
    cases = ("fp32", "accumulation 4", "bf16", "fp16")
    cells = [
        ", ".join(format_ratios([loops], case, name) for case in cases)
        for name in ("hasten", "Accelerate", "Fabric")
    ]
    ways = {row["way"]: row for row in checkpoint["found"]["ways"]}
    state = [
        f"{ways[save_way]['save_s']:.1f} s; {ways[save_way]['load_s']:.1f} s"
        for save_way in SYNCED.values()
    ]
    size = max(row["gigabytes"] for row in ways.values())
    forward = {
        row["what"]: row
        for row in offload["found"]["rows"]
        if row["part"] == "cpu forward"
    }
    limit, weights = forward["hasten"]["limit_s"], forward["hasten"]["GB"]
    return format_rows(
        ["", "bare torch", "hasten", "Accelerate 1.15", "Fabric 2.6"],
        [
            f"whole loop, tiny model: {', '.join(cases)}",
            "1.00",
            f"**{cells[0]}**",
            *cells[1:],
        ],
        [
            f"save {size:.1f} GB of training state, synced; load it",
            state[1],
            f"**{state[0]}**",
            state[2],
            "",
        ],
        [
            f"forward of {weights:.0f} GB of weights in host memory (the link: {limit:.2f} s)",
            "",
            f"**{forward['hasten']['seconds']:.2f} s**",
            f"{forward['Accelerate']['seconds']:.2f} s",
            "",
        ],
    )


def fault_table(runs: list[Run]) -> list[str]:
    page: list[str] = runs[-1]["page"]
    return page


LOOP_CODE = ("accelerator", "optim", "data", "precision", "strategies")
TABLES = (
    Table(
        "headline",
        "README.md",
        "full_loop",
        "cuda",
        (*LOOP_CODE, "checkpoint", "bigmodel"),
        headline_table,
        also=(("checkpoint", "cuda"), ("offload", "cuda")),
    ),
    Table("loop", "docs/performance.md", "full_loop", "cuda", LOOP_CODE, loop_table),
    Table("loop cpu", "docs/performance.md", "full_loop", "cpu", LOOP_CODE, loop_cpu),
    Table(
        "input bound",
        "docs/performance.md",
        "full_loop",
        "cuda",
        ("data",),
        input_bound,
    ),
    Table(
        "checkpoints",
        "docs/performance.md",
        "checkpoint",
        "cuda",
        ("checkpoint", "accelerator"),
        checkpoint_table,
    ),
    Table(
        "big models",
        "docs/performance.md",
        "offload",
        "cuda",
        ("bigmodel",),
        big_models,
    ),
    Table(
        "cold loads",
        "docs/performance.md",
        "cold_loading",
        "cuda",
        ("bigmodel", "checkpoint"),
        cold_loads,
    ),
    Table(
        "sharding",
        "docs/performance.md",
        "sharding",
        "cuda",
        ("strategies",),
        sharding_table,
    ),
    Table(
        "offload training",
        "docs/performance.md",
        "offload_training",
        "cuda",
        ("strategies",),
        offload_training,
    ),
    Table(
        "faults",
        "docs/survive.md",
        "survive_kills",
        "faults in every phase",
        ("survive",),
        fault_table,
    ),
    Table(
        "language models",
        "docs/performance.md",
        "language_models",
        "deep",
        ("strategies", "precision"),
        language_models,
        also=(("language_models", "wide"),),
    ),
)


def format_block(table: Table) -> str:
    """Return what stands in the page: the marks, the table and the runs it comes from."""
    up = "../" * (len(Path(table.page).parts) - 1)
    runs = table.runs()
    sources: dict[str, list[str]] = {}
    for name, run in zip(table.names(), runs, strict=True):
        sources.setdefault(name, []).append(f"{run['date']}, commit {run['commit']}")
    source_texts = "; ".join(
        f"[{name}]({up}benchmarks/results/{name}.md) ({'; '.join(dict.fromkeys(where))})"
        for name, where in sources.items()
    )
    return f"<!-- measured: {table.name} -->\n{table.text()}\n\n{runs[-1]['hardware']}: {source_texts}\n<!-- end -->"


def found_in(page: str, name: str) -> re.Match[str] | None:
    """Return the place of a table in a page."""
    return re.search(
        rf"<!-- measured: {re.escape(name)} -->\n.*?<!-- end -->", page, re.DOTALL
    )


def changed_since(commit: str, code: tuple[str, ...]) -> str:
    """Return how many files of the measured code have changed since a commit."""
    paths = [f"src/hasten/{folder}" for folder in code]
    ask = [
        "git",
        "-C",
        str(ROOT),
        "diff",
        "--name-only",
        commit.rstrip("+"),
        "HEAD",
        "--",
        *paths,
    ]
    done = subprocess.run(ask, capture_output=True, text=True, check=False)
    return (
        f"{len(done.stdout.split())} files of it changed since"
        if done.returncode == 0
        else "its commit is not here"
    )


def main() -> None:
    """List the tables, or write them."""
    for table in TABLES:
        path = ROOT / table.page
        if "--write" in sys.argv:
            text = path.read_text(encoding="utf-8")
            mark = found_in(text, table.name)
            if mark is None:
                sys.exit(
                    f"{table.page} has no mark `<!-- measured: {table.name} -->`; add it where the table belongs"
                )
            path.write_text(
                text[: mark.start()] + format_block(table) + text[mark.end() :],
                encoding="utf-8",
            )
        print(f"{table.page}: {table.name}")
        for name, run in zip(table.names(), table.runs(), strict=True):
            print(
                f"    {name} ({run['setting']}), {run['date']}, {run['hardware']}, commit {run['commit']}; "
                f"measures {', '.join(table.code)}: {changed_since(run['commit'], table.code)}"
            )


if __name__ == "__main__":
    main()
