"""Replicas that are killed and stopped at random instants: the longest pause, lost updates, and the account of all samples.

    python benchmarks/survive_kills.py [--disturbances 20] [--each 5] [--seconds 600]

Needs torchft. Runs of 2, 3 and 4 replicas take turns; each is disturbed several times, by SIGKILL or SIGSTOP, and then checked as in tests/survive: each
sample of each epoch is used by exactly one applied update, and the weights are bit by bit those of one process in plain torch. A pause is the time
between two updates. Compare with the restarts in results/lost_machine.md, which is another program on two machines. Links are not cut.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from recording import record

from tests.survive.checking import check_run, results
from tests.survive.driving import disturb, finish, options_of, start

LIMIT_S = 400.0


def one_run(replicas: int, number: int, rng: random.Random) -> dict[str, Any]:
    """Disturb and check one run; return its numbers."""
    options = options_of({"size": 480 * replicas, "epochs": number, "sleep": 0.03})
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder = Path(name)
        run = start(folder, replicas, options)
        done = disturb(run, folder, number, replicas, rng)
        finish(run, folder, LIMIT_S)
        updates = check_run(folder, options)
        found = list(results(folder).values())
    times = [update["time"] for update in updates]
    gaps = sorted(after - before for before, after in itertools.pairwise(times))
    return {
        "replicas": replicas,
        "kills": len(done.kills),
        "stops": len(done.stops),
        "updates": len(updates),
        "step, median (s)": round(statistics.median(gaps), 3),
        "longest pause (s)": round(gaps[-1], 2),
        "samples given out again": max(one["returned"] for one in found),
        "replicas at the end": len(found),
    }


def page_of(rows: list[dict[str, Any]]) -> str:
    """Return the table of all runs."""
    lines = ["| " + " | ".join(rows[0]) + " |", "|" + "---|" * len(rows[0])]
    lines += ["| " + " | ".join(map(str, row.values())) + " |" for row in rows]
    kills, stops = sum(row["kills"] for row in rows), sum(row["stops"] for row in rows)
    longest = max(row["longest pause (s)"] for row in rows)
    lines += [
        "",
        f"{kills} kills and {stops} stops in {len(rows)} runs: no run ended, every account of samples is exact, the weights are bitwise",
    ]
    lines[-1] += f" those of plain torch, and the longest time between two updates was {longest} s."
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--disturbances", type=int, default=20)
    parser.add_argument("--each", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rng, until = random.Random(args.seed), time.monotonic() + args.seconds
    rows: list[dict[str, Any]] = []
    for replicas in itertools.cycle((2, 3, 4)):
        if time.monotonic() > until or sum(row["kills"] + row["stops"] for row in rows) >= args.disturbances:
            break
        rows.append(one_run(replicas, args.each, rng))
        print(rows[-1], flush=True)
        record("survive_kills", "kills and stops", {"runs": rows}, page_of(rows))
    sys.stdout.write(page_of(rows))


if __name__ == "__main__":
    main()
