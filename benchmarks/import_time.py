"""What a script waits for before and in its first step: the import over torch's, the constructor, `prepare` and one step.

    python benchmarks/import_time.py
    python benchmarks/import_time.py --original FOLDER      # where the original Accelerate is unpacked rather than installed

Each measurement is a fresh process in which torch is imported already, and the contenders take turns. Building the model and the optimizer,
where torch imports its compiler, is not counted. Processor time, because a busy machine disturbs the start of a process most. The first
round fills the caches of the file system and of compiled Python, and is dropped.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from loading import installed_versions
from recording import RESULTS, record_run

SCRIPT = """
import json, sys, time
import torch
clock = time.process_time
begun, module = clock(), sys.argv[1]
if module == "hasten":
    from hasten import Accelerator
elif module == "accelerate":
    from accelerate import Accelerator, __version__
    if "hasten" in __version__:
        sys.exit(3)
times = {"import": clock() - begun}
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = torch.utils.data.DataLoader(torch.randn(8, 8), batch_size=4)
begun = clock()
if module != "torch":
    accelerator = Accelerator(cpu=True)
times["construct"], begun = clock() - begun, clock()
if module != "torch":
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
times["prepare"], begun = clock() - begun, clock()
for x in loader:
    loss = model(x).square().mean()
    loss.backward() if module == "torch" else accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    break
times["first step"] = clock() - begun
print(json.dumps(times | {"all": sum(times.values())}))
"""
PHASES = ("import", "construct", "prepare", "first step", "all")


def measure_once(module: str, original: str) -> dict[str, float] | None:
    """Return the processor seconds of each part in a fresh process; None if the package is not there."""
    paths = [original] if module == "accelerate" and original else []
    python_path = os.pathsep.join([*paths, *sys.path[1:]])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT, module],
        # An empty value counts as unset: without compiled files the import would compile hasten anew in every process.
        env={
            **os.environ,
            "PYTHONPATH": python_path,
            "OMP_NUM_THREADS": "1",
            "PYTHONDONTWRITEBYTECODE": "",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        print(
            f"  {module} left out: {(done.stderr.strip().splitlines() or ['the drop-in is in its place'])[-1]}"
        )
        return None
    phase_seconds: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return phase_seconds


def measure_modules(rounds: int, original: str) -> list[dict[str, Any]]:
    """Return one row for each contender: the median and the quartiles of each part, in milliseconds."""
    modules = [
        module
        for module in ("torch", "hasten", "accelerate")
        if measure_once(module, original)
    ]
    times: dict[str, dict[str, list[float]]] = {
        module: {phase: [] for phase in PHASES} for module in modules
    }
    for turn in range(rounds):
        for module in modules[turn % len(modules) :] + modules[: turn % len(modules)]:
            for phase, seconds in (measure_once(module, original) or {}).items():
                times[module][phase].append(seconds * 1e3)
    return [
        {"what": module}
        | {
            phase: statistics.quantiles(values, n=4)
            for phase, values in phase_times.items()
        }
        for module, phase_times in times.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument(
        "--original", default="", help="folder of the original Accelerate"
    )
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    rows = measure_modules(3 if args.quick else args.rounds, args.original)
    platform_versions = installed_versions() | {"load": f"{os.getloadavg()[0]:.1f}"}
    lines = [
        "# From the import to the first step",
        "",
        ", ".join(f"{k} {v}" for k, v in platform_versions.items()),
        "",
    ]
    lines += [
        "Milliseconds of processor time over `import torch`, median (quartiles):",
        "",
    ]
    lines += ["| | " + " | ".join(PHASES) + " |", "|---|" + "---|" * len(PHASES)]
    for row in rows:
        cells = [
            f"{row[phase][1]:.0f} ({row[phase][0]:.0f}–{row[phase][2]:.0f})"
            for phase in PHASES
        ]
        lines.append(f"| {row['what']} | " + " | ".join(cells) + " |")
    record_run(
        "import_time",
        "cpu",
        {"rows": rows},
        "\n".join(lines),
        platform_versions,
        args.out,
    )
    print("\n".join(lines))


if __name__ == "__main__":
    main()
