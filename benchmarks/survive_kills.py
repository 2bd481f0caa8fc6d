"""Replicas under random faults in every phase: the longest pause, updates lost, and the account of all samples.

    sudo python benchmarks/survive_kills.py [--faults 200] [--seed 0] [--folder build/survive_kills]     # or: make bench-survive

Needs torchft, and root for its network namespaces. Runs of 2, 3 and 4 replicas take turns, each replica on a simulated host. Processes are killed and
stopped (for 0.3 to 5 s, or for good) and links cut (for 0.3 to 15 s, or for good; one in five between two replicas alone), in forward, backward,
exchange, step, save, evaluation and between epochs; some faults hit a second replica while the first is away. Each run is checked: each sample of each
epoch is used by exactly one applied update, weights and evaluations are bit by bit those of one process in plain torch.

The faults follow from the seed. Finished runs are kept in the folder: a second call continues after the last one.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from typing import Any

from recording import measured_commit, record_run

from tests.survive.checking import check_run
from tests.survive.fault_program import PHASES
from tests.survive.faults import (
    KINDS,
    Fault,
    FaultyNetwork,
    StalledRunError,
    decks,
    encoded,
    faulty_network,
    plan_faults,
    run_with_faults,
)
from tests.survive.reading import results, rows

SETTING = "faults in every phase"
EACH = 7
"""Faults in a run."""


# -- one run -----------------------------------------------------------------------------------------------------------
def one_run(
    index: int,
    replicas: int,
    deck: list[tuple[str, str]],
    network: FaultyNetwork,
    args: argparse.Namespace,
) -> dict[str, Any]:
    """Inject faults into one run and check it; return its numbers. A violation is part of them."""
    rng = random.Random(f"{args.seed}-{index}")
    folder = Path(tempfile.mkdtemp(prefix="hasten-faults-"))
    planned = plan_faults(replicas, deck, rng)
    initial_times = processor_times()
    run_row: dict[str, Any] = {
        "seed": args.seed,
        "run": index,
        "replicas": replicas,
        "violation": "",
        "commit": measured_commit(),
    }
    try:
        options, done = run_with_faults(folder, replicas, network, planned, rng)
        run_row |= run_numbers(folder, options, done)
    except (StalledRunError, AssertionError, KeyError) as error:
        done = [fault for fault in planned if fault.at]
        run_row["violation"] = f"{type(error).__name__}: {error}"[:2000]
        shutil.copytree(
            folder,
            args.folder / f"violation-{index}",
            dirs_exist_ok=True,
            ignore=shutil.ignore_patterns("socket", "project"),
        )
    shutil.rmtree(folder, ignore_errors=True)
    return (
        run_row
        | {"faults": [encoded(fault) for fault in done]}
        | load_since(initial_times)
    )


def run_numbers(
    folder: Path, options: dict[str, Any], faults: list[Fault]
) -> dict[str, Any]:
    """Check a finished run; return its pauses and the account of its updates."""
    updates = check_run(folder, options)
    written = [row for row in rows(folder) if row["applied"]]
    first: dict[str, float] = {}
    for row in written:
        first[row["lineage"]] = min(row["time"], first.get(row["lineage"], row["time"]))
    times = [first[update["lineage"]] for update in updates]
    gaps = list(itertools.pairwise(times))
    end_times = [fault.at for fault in faults[1:]] + [times[-1]]
    pauses = [
        max((b - a for a, b in gaps if b > fault.at and a < end), default=0.0)
        for fault, end in zip(faults, end_times, strict=True)
    ]
    final = list(results(folder).values())
    lost = {row["lineage"] for row in written} - {
        update["lineage"] for update in updates
    }
    assert len(lost) <= len(faults), f"{len(lost)} updates were applied and then lost"
    return {
        "updates": len(updates),
        "epochs": options["epochs"],
        "step, median (s)": round(statistics.median(b - a for a, b in gaps), 4),
        "pauses (s)": [round(pause, 2) for pause in pauses],
        "samples given out again": sum(len(lost_samples(update)) for update in updates),
        "updates lost": len(lost),
        "replicas at the end": len(final),
    }


def lost_samples(update: dict[str, Any]) -> list[int]:
    """Return the positions of an update's samples that were given to replicas without a part in it."""
    return [
        position
        for ranges_by_replica in update["rounds"]
        for name, ranges in ranges_by_replica.items()
        if name not in update["contributors"]
        for start, end in ranges
        for position in range(start, end)
    ]


def processor_times() -> list[int]:
    """Return the ticks of all processors so far: busy, idle, stolen."""
    values = [
        int(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:]
    ]
    return [
        values[0] + values[1] + values[2] + values[5] + values[6],
        values[3] + values[4],
        values[7],
        time.monotonic_ns(),
    ]


def load_since(initial_times: list[int]) -> dict[str, Any]:
    """Return the shares of the processors since then, and the machine's load."""
    busy, idle, stolen, took = (
        b - a for a, b in zip(initial_times, processor_times(), strict=True)
    )
    total = max(1, busy + idle + stolen)
    return {
        "seconds": round(took / 1e9, 1),
        "processors busy": round(busy / total, 2),
        "processors stolen": round(stolen / total, 2),
        "load": os.getloadavg()[0],
    }


# -- the page ----------------------------------------------------------------------------------------------------------
def format_table(header: list[str], lines: list[list[object]]) -> list[str]:
    """Return a Markdown table."""
    return [
        f"| {' | '.join(map(str, cells))} |"
        for cells in (header, ["---"] * len(header), *lines)
    ]


def page_of(runs: list[dict[str, Any]]) -> str:
    """Return the tables of all runs."""
    lines = [*by_phase(runs), "", *by_replicas(runs), "", describe_machine(runs), ""]
    lines += [
        f"- Seed {run['seed']}, run {run['run']} with {run['replicas']} replicas: {run['violation']}"
        for run in runs
        if run["violation"]
    ]
    return "\n".join(lines) + "\n"


def by_phase(runs: list[dict[str, Any]]) -> list[str]:
    """Return the number of faults by kind and phase."""
    faults = [fault for run in runs for fault in run["faults"]]
    hits = Counter((fault["kind"], fault["hit"]) for fault in faults)
    phases = [*PHASES, *sorted({fault["hit"] for fault in faults} - set(PHASES))]
    counts = [[kind, *(hits[kind, phase] for phase in phases)] for kind in KINDS]
    table_lines = format_table(
        ["faults", *phases, "all"], [[*row, sum(row[1:])] for row in counts]
    )  # type: ignore[arg-type]  # numbers
    violations = sum(bool(run["violation"]) for run in runs)
    return [
        *table_lines,
        "",
        f"{len(faults)} faults in {len(runs)} runs; runs that ended, stalled, lost more updates than they had faults, or had wrong samples or weights: {violations}.",
    ]


def by_replicas(runs: list[dict[str, Any]]) -> list[str]:
    """Return the pauses and updates by number of replicas."""
    header = [
        "replicas",
        "runs",
        "faults",
        "updates",
        "longest pause",
        "pause, median",
        "samples given out again",
        "updates lost",
    ]
    table_rows: list[list[object]] = []
    for replicas in sorted({run["replicas"] for run in runs if not run["violation"]}):
        replica_runs = [
            run for run in runs if run["replicas"] == replicas and not run["violation"]
        ]
        pauses = [pause for run in replica_runs for pause in run["pauses (s)"]]
        sums = [
            sum(run[key] for run in replica_runs)
            for key in ("updates", "samples given out again", "updates lost")
        ]
        row = [
            replicas,
            len(replica_runs),
            len(pauses),
            sums[0],
            f"{max(pauses):.1f} s",
            f"{statistics.median(pauses):.1f} s",
        ]
        table_rows.append([*row, *sums[1:]])
    return format_table(header, table_rows)


def describe_machine(runs: list[dict[str, Any]]) -> str:
    """Return a sentence about the machine during the runs."""
    busy, stolen = (
        statistics.mean(run[key] for run in runs)
        for key in ("processors busy", "processors stolen")
    )
    loads = [run["load"] for run in runs]
    return (
        f"The machine had other work at the same time: load average {min(loads):.0f} to {max(loads):.0f} on {os.cpu_count()} cores, processors "
        f"{busy:.0%} busy, {stolen:.0%} of their time taken by the host; an update without faults took "
        f"{1e3 * statistics.median(run['step, median (s)'] for run in runs if not run['violation']):.0f} ms."
    )


# -- all runs ----------------------------------------------------------------------------------------------------------
def kept_rows(folder: Path, pattern: str) -> list[dict[str, Any]]:
    """Return the rows of all files of the folder whose names match."""
    return [
        json.loads(line)
        for path in sorted(folder.glob(pattern))
        for line in path.read_text().splitlines()
    ]


def append_rows(path: Path, rows_: list[dict[str, Any]]) -> None:
    """Append rows to a file."""
    with path.open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows_)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path("build/survive_kills"),
        help="finished runs; a second call continues",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=7200.0,
        help="start no further run after this time",
    )
    args = parser.parse_args()
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit("stopped; a second call continues")
    )
    args.folder.mkdir(parents=True, exist_ok=True)
    if args.faults:  # 0 makes the page of the runs that are kept
        inject_all(args)
    runs = kept_rows(args.folder, "runs-*.jsonl")
    page = page_of(runs)
    versions = {"torch": version("torch"), "torchft": version("torchft")}
    record_run(
        "survive_kills",
        SETTING,
        {"runs": [compact_run(run) for run in runs]},
        page,
        versions,
    )
    sys.stdout.write(page)
    sys.exit(any(run["violation"] for run in runs))


def inject_all(args: argparse.Namespace) -> None:
    """Make the runs that are missing."""
    runs_file = args.folder / f"runs-{args.seed}.jsonl"
    runs = kept_rows(args.folder, runs_file.name)
    dealt = decks(random.Random(args.seed), EACH)
    until = time.monotonic() + args.seconds
    with (
        tempfile.TemporaryDirectory(prefix="hasten-faults-") as name,
        faulty_network(Path(name), 4) as network,
    ):
        for index, replicas in enumerate(itertools.cycle((2, 3, 4))):
            deck = next(dealt)
            if index < len(runs):
                continue
            if (
                time.monotonic() > until
                or sum(len(run["faults"]) for run in runs) >= args.faults
            ):
                break
            runs.append(one_run(index, replicas, deck, network, args))
            append_rows(runs_file, runs[-1:])
            print_run(runs)


def compact_run(run: dict[str, Any]) -> dict[str, Any]:
    """Return a run as it is recorded: each fault on one line."""
    pauses = run.get("pauses (s)") or [None] * len(run["faults"])
    faults = [
        f"{fault['kind']} in {fault['hit']} of replica {fault['name']}"
        + (f" from {fault['other']}" if fault["pair"] else "")
        + (
            ""
            if fault["kind"] == "kill"
            else " for good"
            if fault["seconds"] < 0
            else f" for {fault['seconds']} s"
        )
        + (", while another is away" if fault["follows_s"] is not None else "")
        + f": pause {pause} s"
        for fault, pause in zip(run["faults"], pauses, strict=True)
    ]
    return {key: value for key, value in run.items() if key != "pauses (s)"} | {
        "faults": faults
    }


def print_run(runs: list[dict[str, Any]]) -> None:
    """Print one line about the newest run."""
    run, faults = runs[-1], sum(len(finished["faults"]) for finished in runs)
    print(
        f"run {run['run']}: {run['replicas']} replicas, {[(fault['kind'], fault['hit'], fault['seconds']) for fault in run['faults']]}, pauses {run.get('pauses (s)')}, "
        f"{run['seconds']} s, load {run['load']:.1f}; {faults} faults, {sum(bool(finished['violation']) for finished in runs)} violations {run['violation'][:300]}",
        flush=True,
    )


if __name__ == "__main__":
    main()
