"""transformers' Trainer with DeepSpeed configurations, on the drop-in beside the original package, on a GPU.

    python benchmarks/dropin_deepspeed.py                       # the original and DeepSpeed are installed here
    python benchmarks/dropin_deepspeed.py --original FOLDER     # the original unpacked: pip install --target FOLDER

On a CPU the original leaves DeepSpeed out and trains with DDP, so a GPU is needed to compare the two. Each package runs in a
process of its own (either_package.py says how) and trains a small BERT without DeepSpeed, with ZeRO 2 and the Trainer's
optimizer, with ZeRO 3 and an optimizer and a scheduler made by DeepSpeed, and with ZeRO 3 from weights that are partitioned
while they are read; then each again, resumed from its checkpoint after three updates. Losses, gradient norms and learning
rates of all steps are compared. The scheduler that DeepSpeed makes steps inside of `backward` in the original and where the
loop steps it on the drop-in, so that Trainer, which reads the rate between the two, logs the rate of the next update with the
original and that of this one with the drop-in: there, rates are compared by the update they belong to.

Ends with an error when the numbers differ.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import traceback
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any

from either_package import PACKAGES, ROOT, command, environment

CLIENTS = ROOT / "dropin" / "tests" / "clients"
TOLERANCE = 1e-6
CASES = {
    "without": "no DeepSpeed",
    "own": "ZeRO 2, the Trainer's optimizer",
    "made": "ZeRO 3, DeepSpeed's optimizer and scheduler",
    "partitioned": "ZeRO 3, weights partitioned while they are read",
}
Log = list[dict[str, float]]
Logs = dict[str, Log]
"""A whole training, and a resumed one."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--original", type=Path, help="folder with the original package, where it is not installed")
    parser.add_argument("--out", type=Path, help="folder for the results; benchmarks/results by default")
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.inside:
        inside(args.inside)
        return
    from loading import versions
    from recording import record

    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor() as pool:
        logs = pool.map(lambda package: trained(package, args.original, Path(folder) / package), PACKAGES)
        found = dict(zip(PACKAGES, logs, strict=True))
    rows = [
        compared(name, how, *(found[package][name][how] for package in PACKAGES))
        for name in CASES
        for how in ("whole", "resumed")
    ]
    known = {**versions("cuda"), **{name: metadata.version(name) for name in ("transformers", "deepspeed")}}
    record("dropin_deepspeed", "cuda", {"rows": rows, "found": found}, page(known, rows), known, args.out)
    if not all(row["equal"] for row in rows):
        sys.exit("the drop-in's numbers differ from the original's")


def trained(package: str, original: Path | None, folder: Path) -> dict[str, Logs]:
    """The logs of every case in a process that finds this package."""
    place = environment(package, folder / "site", original)
    words, variables = command(place, __file__, "--inside", str(folder))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    variables |= {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    variables |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    subprocess.run(words, env=variables, check=True)
    found: dict[str, Logs] = json.loads((folder / "found.json").read_text())
    return found


def compared(name: str, how: str, theirs: Log, ours: Log) -> dict[str, Any]:
    """The largest difference over all steps of one case."""
    if name == "made":
        theirs, ours = by_update(theirs, ahead=1), by_update(ours, ahead=0)
    same = [set(a) for a in theirs] == [set(b) for b in ours]
    pairs = [(a[key], b[key]) for a, b in zip(theirs, ours, strict=True) for key in a] if same else []
    apart = max((abs(a - b) for a, b in pairs), default=float("inf"))
    row = {"case": f"{CASES[name]}, {how}", "steps": len(theirs), "numbers": len(pairs), "apart": apart}
    return {**row, "equal": apart <= TOLERANCE}


def by_update(log: Log, ahead: int) -> Log:
    """The log with each learning rate at the update that used it, without the first update, whose rate one package does not log."""
    rates = {row["step"] + ahead: row["learning_rate"] for row in log if "learning_rate" in row}
    return [
        {**row, "learning_rate": rates[row["step"]]} if "learning_rate" in row else row
        for row in log
        if row["step"] > 1
    ]


def page(known: dict[str, str], rows: list[dict[str, Any]]) -> str:
    """The table."""
    lines = ["# Trainer with DeepSpeed on the drop-in, beside the original", ""]
    lines += [", ".join(f"{key} {value}" for key, value in known.items()), ""]
    lines += [
        "| configuration | logged steps | numbers compared | largest difference | equal |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        said = "yes" if row["equal"] else "NO"
        lines.append(f"| {row['case']} | {row['steps']} | {row['numbers']} | {row['apart']:.3g} | {said} |")
    return "\n".join(lines) + "\n"


# -- inside of one package's process ------------------------------------------------------------------------------
def inside(folder: Path) -> None:
    """Train every case and leave the logs in found.json."""
    sys.path.insert(0, str(CLIENTS))
    import engine  # type: ignore[import-not-found]  # the client of the drop-in's tests
    import outcome  # type: ignore[import-not-found]
    import torch

    torch.use_deterministic_algorithms(True, warn_only=True)
    outcome.SHORT["use_cpu"] = not torch.cuda.is_available()
    outcome.SHORT["warmup_steps"] = 2  # DeepSpeed's scheduler needs some
    engine.MADE["optimizer"]["params"]["torch_adam"] = True  # DeepSpeed's own kernel would have to be compiled
    weights = str(folder / "weights")
    engine.model().save_pretrained(weights)
    logs: dict[str, Logs] = {}
    for name, config, build in (
        ("without", None, engine.model),
        ("own", engine.OWN, engine.model),
        ("made", engine.MADE, engine.model),
        ("partitioned", engine.PARTITIONED, lambda: engine.loaded(weights)),
    ):
        try:
            logs[name] = engine.losses(str(folder / name), config, build)
        except Exception as error:  # the other configurations are compared all the same
            traceback.print_exc()
            failed = [{f"{type(error).__name__}: {error}"[:200]: float("nan"), "step": 0.0}]
            logs[name] = {"whole": failed, "resumed": failed}
    (folder / "found.json").write_text(json.dumps(logs))
    os._exit(0)  # the original leaves a process group behind, whose end is not a matter of this comparison


if __name__ == "__main__":
    main()
