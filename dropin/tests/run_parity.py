"""Run the parity scripts under whichever package is installed, and tell how results of two packages differ.

python tests/run_parity.py run OUT.json [name …]     # all scripts in this process (or in each rank under torchrun)
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import random
import re
import sys
import warnings
from pathlib import Path
from typing import Any

TESTS_FOLDER = Path(__file__).parent
TOLERANCE = 1e-6
OTHER_PROCESSOR = 5e-3
"""Recordings of another kind of processor: its kernels sum in another order, and adversarial training amplifies the last bits
(plain torch differs by as much). `make parity` records the original on the machine at hand and compares within TOLERANCE."""
NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e[-+]?\d+)?")
# What a printed line may say otherwise each time: how long things took, where files lie, which launcher speaks.
PASSING = re.compile(
    r"'\w+_(runtime|per_second)': '?[\d.]+'?,? ?|(?<= )/\S+/|^Launching training on .*\n",
    re.MULTILINE,
)
# What differs on purpose: for a recording, its parts and why. DIFFERENCES.md has a line for each.
EXPLAINED: dict[str, dict[str, str]] = {
    "parity_2": {
        "split_between": "a dict's rows are all dealt out, the original loses one"
    },
    "painting_2": {
        "after": "after a resume the original reads the first epoch's order again, the drop-in goes on"
    },
    "denoising_2": {
        "split": "the original accepts Accelerator(split_batches=True) and ignores it"
    },
}
# These end the process group. On the original a second group in the same processes may read addresses of the first one's
# and hang, so they go last.
ENDING = ("custom_tracker",)


def names() -> list[str]:
    """The scripts, in the order they run."""
    stems = (path.stem for path in (TESTS_FOLDER / "parity").glob("*.py"))
    return sorted(stems, key=lambda name: (name in ENDING, name))


def load(name: str) -> Any:
    """A script as a module."""
    spec = importlib.util.spec_from_file_location(
        f"parity_{name}", TESTS_FOLDER / "parity" / f"{name}.py"
    )
    assert spec is not None and spec.loader is not None, f"no script {name}"
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def fresh() -> None:
    """Forget process-wide states and seed everything alike."""
    import numpy as np
    import torch

    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


def run(script_names: list[str]) -> dict[str, Any]:
    """What every script gives; an error is its message."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    results: dict[str, Any] = {}
    for name in script_names:
        module = load(name)
        if world not in module.PROCESSES:
            continue
        sys.stderr.write(f"{name}\n")
        fresh()
        try:
            results[name] = json.loads(json.dumps(module.run()))
        except Exception as error:
            results[name] = {"error": f"{type(error).__name__}: {error}"}
    return results


def differences(
    first: Any, second: Any, path: str = "", tolerance: float = TOLERANCE
) -> list[str]:
    """Where two results differ, numbers within the tolerance aside."""
    if isinstance(first, float) and isinstance(second, int | float):
        is_close = abs(first - second) <= tolerance * max(1.0, abs(first))
        return [] if is_close else [f"{path}: {first} and {second}"]
    if type(first) is not type(second):
        return [f"{path}: {first!r} and {second!r}"]
    if isinstance(first, dict):
        one_sided = [
            f"{path}/{key}: on one side only" for key in first.keys() ^ second.keys()
        ]
        return one_sided + [
            difference
            for key in first.keys() & second.keys()
            for difference in differences(
                first[key], second[key], f"{path}/{key}", tolerance
            )
        ]
    if isinstance(first, list):
        if len(first) != len(second):
            return [
                f"{path}: {len(first)} and {len(second)} items: {str(first)[:200]} and {str(second)[:200]}"
            ]
        return [
            difference
            for index, (a, b) in enumerate(zip(first, second, strict=True))
            for difference in differences(a, b, f"{path}[{index}]", tolerance)
        ]
    return [] if first == second else [f"{path}: {first!r} and {second!r}"]


def recorded_tolerance() -> float:
    """How far results may lie from the committed recordings on this machine."""
    recorded = json.loads(
        (Path(__file__).parent / "golden" / "versions.json").read_text()
    )["machine"]
    return TOLERANCE if platform.machine() == recorded else OTHER_PROCESSOR


def text_differences(
    first: str, second: str, tolerance: float = TOLERANCE
) -> list[str]:
    """Where two printed texts differ, numbers within the tolerance and what passes aside."""
    first_lines, second_lines = (
        PASSING.sub("", text).splitlines() for text in (first, second)
    )
    if len(first_lines) != len(second_lines):
        return [
            f"{len(first_lines)} and {len(second_lines)} lines:\n{first}\nand\n{second}"
        ]
    split = [
        (
            (NUMBER.split(a), list(map(float, NUMBER.findall(a)))),
            (NUMBER.split(b), list(map(float, NUMBER.findall(b)))),
        )
        for a, b in zip(first_lines, second_lines, strict=True)
    ]
    return [
        f"{first_lines[index]!r} and {second_lines[index]!r}"
        for index, (a, b) in enumerate(split)
        if a[0] != b[0] or differences(a[1], b[1], tolerance=tolerance)
    ]


def unexplained(
    recording: str, first: dict[str, Any], second: dict[str, Any]
) -> list[str]:
    """Differences between two runs that no entry of EXPLAINED covers."""
    explained = EXPLAINED.get(recording, {})
    one_sided = [
        f"{key}: on one side only" for key in sorted(first.keys() ^ second.keys())
    ]
    return one_sided + [
        difference
        for key in sorted(first.keys() & second.keys())
        if key not in explained
        for difference in differences(first[key], second[key], key)
    ]


def listed(recording: str, first: dict[str, Any], second: dict[str, Any]) -> list[str]:
    """The parts that EXPLAINED lists and that do differ."""
    return [
        key
        for key in EXPLAINED.get(recording, {})
        if differences(first.get(key), second.get(key))
    ]


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    assert sys.argv[1] == "run", f"unknown command {sys.argv[1]}"
    outcome = run(sys.argv[3:] or names())
    if int(os.environ.get("RANK", "0")) == 0:
        Path(sys.argv[2]).write_text(
            json.dumps(outcome, indent=0, sort_keys=True) + "\n"
        )
