"""Fine-tune MRPC with several seeds and compare accuracy and F1 on all test pairs with the target.

    python benchmarks/mrpc_pack.py path/to/mrpc runs/mrpc_pack
    python benchmarks/mrpc_seeds.py --data runs/mrpc_pack/data --model runs/mrpc_pack/model --out benchmarks/results

Every seed is one run of examples/mrpc.py as it is. Ends with an error when a seed stays below the target.
"""

from __future__ import annotations

import argparse
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from recording import record

from hasten import read_metrics

EXAMPLE = Path(__file__).parents[1] / "examples" / "mrpc.py"
ACCURACY, F1 = 0.79, 0.85


def mrpc_options(purpose: str | None) -> argparse.ArgumentParser:
    """The options of a benchmark that trains on the pairs with several seeds."""
    parser = argparse.ArgumentParser(description=purpose, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="folder of the pairs")
    parser.add_argument("--model", required=True, help="folder of the model")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="folder for the results")
    return parser


def main() -> None:
    """Run the seeds, print a line for each, and leave a JSON file."""
    parser = mrpc_options(__doc__)
    args, rest = parser.parse_known_args()  # the rest goes to the example, such as --lr and --batch_size
    rows = [run(args, seed, rest) for seed in args.seeds]
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or "cpu"
    reached = all(row["accuracy"] >= ACCURACY and row["f1"] >= F1 for row in rows)
    result = {
        "device": device, "torch": torch.__version__, "epochs": args.epochs, "extra": rest,
        "target": {"accuracy": ACCURACY, "f1": F1}, "reached": reached, "seeds": rows,
    }  # fmt: skip
    rows_of = [f"| {row['seed']} | {row['accuracy']:.3f} | {row['f1']:.3f} |" for row in rows]
    page = "\n".join(["# MRPC on several seeds", "", "| seed | accuracy | F1 |", "|---|---|---|", *rows_of])
    record("mrpc_seeds", "cuda" if torch.cuda.is_available() else "cpu", result, page, folder=args.out)
    if not reached:
        sys.exit(f"below the target of accuracy {ACCURACY} and F1 {F1}")


def run(args: argparse.Namespace, seed: int, rest: list[str]) -> dict[str, Any]:
    """One seed: the scores after the last epoch, and how long it took."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(EXAMPLE), "--data", args.data, "--model", args.model, "--seed", str(seed)]
        command += ["--epochs", str(args.epochs), "--out", folder, *rest]
        began = time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        seconds = time.perf_counter() - began
        (file,) = Path(folder).glob("mrpc/*/metrics.jsonl")
        rows = read_metrics(file)
    scores = [row for row in rows if "f1" in row]
    losses = [row["loss"] for row in rows if "loss" in row]
    found = {
        "seed": seed, "accuracy": scores[-1]["accuracy"], "f1": scores[-1]["f1"],
        "each_epoch": [[row["accuracy"], row["f1"]] for row in scores],
        "steps": len(losses), "first_loss": losses[0], "last_loss": losses[-1], "seconds": seconds,
    }  # fmt: skip
    print(f"seed {seed}: accuracy {found['accuracy']:.4f}, F1 {found['f1']:.4f}, {seconds:.0f} s", flush=True)
    return found


if __name__ == "__main__":
    main()
