"""The input-bound loop of input_bound.py through the drop-in, beside hasten, bare torch and the original package.

    python benchmarks/dropin_input_bound.py --device cuda                     # the original is installed here
    python benchmarks/dropin_input_bound.py --original FOLDER --quick         # or unpacked: pip install --target FOLDER
    python benchmarks/dropin_input_bound.py --only drop-in                    # without the original

Each package is measured in a process of its own, in an environment in which the other is not installed
(either_package.py says how), with bare torch and hasten beside it. The goal is a step of 1.15 times the longer of copy
and compute.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from either_package import PACKAGES, command, environment

GOAL = 1.15


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--original", type=Path, help="folder with the original package, where it is not installed")
    parser.add_argument("--only", choices=PACKAGES, help="measure one package")
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.inside:
        print(json.dumps(inside(args.device, args.quick)))
        return
    from loading import report

    rows = [
        measured(package, args.device, args.quick, args.original)
        for package in PACKAGES
        if args.only in (None, package)
    ]
    report("dropin_input_bound", "Input-bound loop through the drop-in", rows, args.device)
    ratio = next((row["accelerate / max(copy, compute)"] for row in rows if row["package"] == "drop-in"), 0.0)
    if args.device == "cuda" and ratio > GOAL:
        sys.exit(f"the drop-in takes {ratio:.3f} times the longer of copy and compute, more than {GOAL}")


def measured(package: str, device: str, quick: bool, original: Path | None) -> dict[str, Any]:
    """One row, measured in a process that finds this package."""
    with tempfile.TemporaryDirectory() as folder:
        place = environment(package, Path(folder) / package, original)
        options = ["--inside", package, "--device", device, *(["--quick"] if quick else [])]
        words, variables = command(place, __file__, *options)
        done = subprocess.run(words, env=variables, stdout=subprocess.PIPE, text=True, check=True)
    return {"package": package, **json.loads(done.stdout.splitlines()[-1])}


def inside(device: str, quick: bool) -> dict[str, Any]:
    """The numbers of the package that this process finds."""
    import loading
    import torch
    from input_bound import measure

    import accelerate

    loading.CONTENDERS.pop("Accelerate")
    loading.CONTENDERS.pop("Fabric")
    loading.CONTENDERS["accelerate"] = loading.whichever
    row = measure(torch.device(device), 3 if quick or device == "cpu" else 12)
    return {"version": accelerate.__version__, **row}


if __name__ == "__main__":
    main()
