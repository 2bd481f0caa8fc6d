"""Every example that needs no network, as a fresh process on this machine's accelerator: whether it ends, in how long, and its last line.

    python benchmarks/examples_on_device.py              # about five minutes on one GPU
    python benchmarks/examples_on_device.py --only big_model resume

Examples that need a package that is missing, or more than one process, are named with the reason.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from loading import versions
from recording import record

EXAMPLES = Path(__file__).parents[1] / "examples"
ARGUMENTS: dict[str, str] = {
    "digits": "",
    "gan": "--epochs 5 --samples 2000 --batch_size 64",
    "char_lm": "--steps 12 --accumulate 2 --batch_size 4 --context 16 --width 32 --depth 1 --write 8 --megabytes 0.05",
    "resume": "--epochs 2 --out {folder}/resume",
    "early_stopping": "--max_epochs 4",
    "cross_validation": "--folds 2 --epochs 2 --out {folder}/folds",
    "local_sgd": "--epochs 3",
    "profiling": "--steps 3 --out {folder}/traces",
    "auto_batch_size": "--batch_size 256 --epochs 2",
    "muon_ema": "",
    "packing": "",
    "generate": "",
    "fsdp2": "",
    "big_model": "",
}
VARIANTS: dict[str, str] = {"big_model, streamed": "--budget 2MB --host 2MB"}
"""Further command lines of an example."""
TIMEOUT_S = 120


def run_example(title: str, arguments: str, folder: Path) -> dict[str, Any]:
    """Run one example and return its row."""
    script = EXAMPLES / f"{title.partition(',')[0]}.py"
    command = [sys.executable, str(script), *arguments.format(folder=folder).split()]
    started_s = time.perf_counter()
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    try:
        ended = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
        code, lines = ended.returncode, (ended.stdout if ended.returncode == 0 else ended.stderr).strip().splitlines()
    except subprocess.TimeoutExpired:
        code, lines = 124, [f"not finished after {TIMEOUT_S} s"]
    row = {
        "example": title,
        "arguments": arguments,
        "exit_code": code,
        "seconds": round(time.perf_counter() - started_s, 1),
        "last_line": lines[-1].strip() if lines else "",
    }
    print(json.dumps(row), flush=True)
    return row


def page(rows: list[dict[str, Any]], known: dict[str, str]) -> str:
    lines = ["# Examples on an accelerator", "", ", ".join(f"{key} {value}" for key, value in known.items()), ""]
    lines += ["| example | exit code | seconds | last line |", "|---|---|---|---|"]
    for row in rows:
        last_line = row["last_line"].replace("|", "\\|")
        lines.append(f"| `{row['example']}` {row['arguments']} | {row['exit_code']} | {row['seconds']} | {last_line} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", help="names of examples")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    chosen = {
        title: arguments
        for title, arguments in {**ARGUMENTS, **VARIANTS}.items()
        if not args.only or title.partition(",")[0] in args.only
    }
    with tempfile.TemporaryDirectory(prefix="hasten-examples-") as folder:
        rows = [run_example(title, arguments, Path(folder)) for title, arguments in chosen.items()]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    known = versions(device)
    print(page(rows, known))
    record("examples_on_device", device, rows, page(rows, known), known, args.out)
    sys.exit(any(row["exit_code"] for row in rows))


if __name__ == "__main__":
    main()
