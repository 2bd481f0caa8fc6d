"""Saving and loading a model with AdamW state: hasten beside torch.save and, where it is installed, Accelerate.

    python benchmarks/checkpoint.py                      # CPU: 67 M parameters, 0.8 GB of state
    python benchmarks/checkpoint.py --background         # how long save_state(blocking=False) holds the loop, from the first save on
    python benchmarks/checkpoint.py --preset large       # 774 M parameters, 9.3 GB of state, on the accelerator

Each way saves and loads several times in one process, in changing order, after a sync of the disks, so that none waits
for what another has left to write; the median is printed, one JSON line per way, and all go to benchmarks/results (or
--out). Accelerate takes part where it is installed. Reads come from the page cache, as when a run resumes on the
machine that saved. hasten syncs to the disk before it returns; the others do not, so their times leave the disk's own
work out: the rows "synced" and "hasten unsynced, unverified" compare like with like. hasten verifies every byte before
it loads, the others do not.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib.util
import json
import os
import random
import resource
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from loading import installed_versions
from recording import RESULTS, record_run
from torch import nn

from hasten import __version__ as hasten_version

PRESETS = {
    "small": (512, 16, 32_000),
    "medium": (1024, 16, 32_000),
    "large": (1280, 36, 50_257),
}  # width, depth, vocabulary


class Block(nn.Module):
    """The weights of one transformer block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.output = (
            nn.Linear(width, 3 * width),
            nn.Linear(width, width),
        )
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)


def build_model_and_optimizer(
    preset: str, device: torch.device
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A GPT-2 shaped model and AdamW with its state filled."""
    width, depth, vocab = PRESETS[preset]
    with torch.device(device):
        model = nn.Module()
        model.tokens, model.places = (
            nn.Embedding(vocab, width),
            nn.Embedding(1024, width),
        )
        model.blocks = nn.ModuleList(Block(width) for _ in range(depth))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=False)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def synchronize_device(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def time_action(action: Callable[[], object], device: torch.device) -> float:
    gc.collect()
    os.sync()
    synchronize_device(device)
    started = time.perf_counter()
    action()
    synchronize_device(device)
    return time.perf_counter() - started


class Torch:
    """torch.save and torch.load of the two state dicts."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device
    ) -> None:
        self.model, self.optimizer, self.device = model, optimizer, device

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(
            {
                "model": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
            },
            folder / "state.pt",
        )

    def load(self, folder: Path) -> None:
        state = torch.load(
            folder / "state.pt", map_location=self.device, weights_only=True
        )
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])


class TorchSynced(Torch):
    """torch.save, and then what makes it safe against a power cut: the bytes on the disk."""

    def save(self, folder: Path) -> None:
        super().save(folder)
        with (folder / "state.pt").open("rb") as file:
            os.fsync(file.fileno())


class Accelerate:
    """save_state and load_state of Hugging Face Accelerate."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device
    ) -> None:
        # the peer, only where the environment has it
        from accelerate import Accelerator

        self.accelerator = Accelerator(cpu=device.type == "cpu")
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)

    def save(self, folder: Path) -> None:
        self.accelerator.save_state(str(folder))

    def load(self, folder: Path) -> None:
        self.accelerator.load_state(str(folder))


class AccelerateSynced(Accelerate):
    """The same, and then its bytes on the disk."""

    def save(self, folder: Path) -> None:
        super().save(folder)
        for path in folder.rglob("*"):
            with path.open("rb") as file:
                os.fsync(file.fileno())


class Hasten:
    """save_state and load_state of hasten: synced, checksummed, verified before loading."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device
    ) -> None:
        from hasten import Accelerator

        self.accelerator = Accelerator(cpu=device.type == "cpu")
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)

    def save(self, folder: Path) -> None:
        self.accelerator.save_state(folder)

    def load(self, folder: Path) -> None:
        self.accelerator.load_state(folder)


class Unsynced(Hasten):
    """The same without waiting for the disk and without verifying, as the others do: not options of the library."""

    def save(self, folder: Path) -> None:
        with mock.patch("hasten.checkpoint.store.disk.os.fsync", return_value=None):
            super().save(folder)

    def load(self, folder: Path) -> None:
        self.accelerator._saving.load_state(folder, verify=False)


@contextlib.contextmanager
def scratch_folder(root: str | None) -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="bench-ckpt-", dir=root))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def measure_methods(
    ways: dict[str, Any],
    device: torch.device,
    rounds: int,
    peer_rounds: int,
    root: str | None,
) -> Iterator[dict[str, Any]]:
    """Each round takes every way once, so that a busy machine is busy for all of them, and in another order each time.

    The order matters: memory that one way's files leave behind goes back to the host of a virtual machine after a
    while, and whoever comes next waits up to a second for new memory.
    """
    saves: dict[str, list[float]] = {name: [] for name in ways}
    loads: dict[str, list[float]] = {name: [] for name in ways}
    sizes = {}
    pick = random.Random(0)
    drawn = [
        (number, name)
        for number in range(rounds)
        for name in pick.sample(sorted(ways), len(ways))
    ]
    turns = [
        (number, name)
        for number, name in drawn
        if number < peer_rounds or name.startswith("hasten")
    ]
    for number, name in turns:
        method = ways[name]
        with scratch_folder(root) as folder:
            saves[name].append(
                time_action(partial(method.save, folder / f"c{number}"), device)
            )
            loads[name].append(
                time_action(partial(method.load, folder / f"c{number}"), device)
            )
            sizes[name] = sum(
                path.stat().st_size for path in folder.rglob("*") if path.is_file()
            )
    for name in ways:
        yield {
            "way": name,
            "save_s": round(statistics.median(saves[name]), 3),
            "load_s": round(statistics.median(loads[name]), 3),
            "saves": [round(s, 3) for s in saves[name]],
            "loads": [round(s, 3) for s in loads[name]],
            "gigabytes": round(sizes[name] / 1e9, 2),
        }


def measure_async(
    method: Hasten, device: torch.device, rounds: int, root: str | None
) -> dict[str, Any]:
    """How long save_state(blocking=False) holds training up, the first time and later, and how long it writes."""
    stalls, totals = [], []
    with scratch_folder(root) as folder:
        for number in range(rounds):
            stalls.append(
                time_action(
                    lambda n=number: method.accelerator.save_state(
                        folder / f"c{n}", blocking=False
                    ),
                    device,
                )  # type: ignore[misc]
            )
            started = time.perf_counter()
            method.accelerator.wait_for_saves()
            totals.append(stalls[-1] + time.perf_counter() - started)
            shutil.rmtree(folder / f"c{number}")
    return {
        "way": "hasten async",
        "first_stall_s": round(stalls[0], 3),
        "stall_s": round(statistics.median(stalls[1:] or stalls), 3),
        "stalls": [round(s, 3) for s in stalls],
        "written_after_s": [round(s, 3) for s in totals],
        "peak_host_gb": round(
            resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6, 2
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--preset",
        choices=sorted(PRESETS),
        default=None,
        help="default: small on the CPU, else large",
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--peer-rounds",
        type=int,
        help="rounds in which the peers take part (default: all)",
    )
    parser.add_argument(
        "--blocking", action="store_true", help="leave saves in the background out"
    )
    parser.add_argument(
        "--background",
        action="store_true",
        help="only saves in the background, in a fresh process",
    )
    parser.add_argument(
        "--only", nargs="+", default=None, help="torch, accelerate, hasten, ..."
    )
    parser.add_argument(
        "--folder", default=None, help="where to write (default: the temporary folder)"
    )
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument(
        "--out", type=Path, default=RESULTS, help="folder for the results"
    )
    args = parser.parse_args()
    accelerator = (
        torch.accelerator.current_accelerator()
        if torch.accelerator.is_available()
        else None
    )
    device = (
        torch.device("cpu")
        if args.cpu or accelerator is None
        else torch.device(accelerator.type, 0)
    )
    preset = args.preset or ("small" if device.type == "cpu" else "large")
    model, optimizer = build_model_and_optimizer(preset, device)
    count = sum(p.numel() for p in model.parameters())
    print(
        json.dumps(
            {
                "parameters_m": round(count / 1e6, 1),
                "device": str(device),
                "torch": torch.__version__,
            }
        ),
        flush=True,
    )
    kinds: dict[str, Any] = {
        "torch": Torch,
        "torch synced": TorchSynced,
        "accelerate": Accelerate,
        "accelerate synced": AccelerateSynced,
        "hasten": Hasten,
        "hasten unsynced, unverified": Unsynced,
    }
    ways = {
        name: kind(model, optimizer, device)
        for name, kind in kinds.items()
        if name in (args.only or kinds)
        and importlib.util.find_spec(name.split()[0]) is not None
    }
    results = []
    if args.background:
        print(
            json.dumps(measure_async(ways["hasten"], device, args.rounds, args.folder))
        )
        ways["hasten"].accelerator.end_training()
        return
    for result in measure_methods(
        ways, device, args.rounds, args.peer_rounds or args.rounds, args.folder
    ):
        print(json.dumps(result), flush=True)
        results.append(result)
    platform_versions = {
        **installed_versions(device.type),
        "hasten": hasten_version,
        "parameters": f"{count / 1e6:.0f} M",
    }

    def record_measurements(background: dict[str, Any]) -> None:
        measurements = {"ways": results, "background": background}
        record_run(
            "checkpoint",
            device.type,
            measurements,
            format_page(platform_versions, results, background),
            platform_versions,
            args.out,
        )

    record_measurements({})  # should the rest be cut off
    if "hasten" in ways and not args.blocking:
        background = measure_async(ways["hasten"], device, args.rounds, args.folder)
        print(json.dumps(background), flush=True)
        record_measurements(background)
        ways["hasten"].accelerator.end_training()


def format_page(
    platform_versions: dict[str, str],
    results: list[dict[str, Any]],
    background: dict[str, Any],
) -> str:
    size = max(result["gigabytes"] for result in results)
    lines = [
        f"# Saving and loading {platform_versions['parameters']} parameters with AdamW state ({size} GB)",
        "",
    ]
    lines += [
        ", ".join(f"{key} {value}" for key, value in platform_versions.items()),
        "",
    ]
    lines += [
        "| way | save (s) | load (s) | each save | each load |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {r['way']} | {r['save_s']:.2f} | {r['load_s']:.2f} | {_join_numbers(r['saves'])} | {_join_numbers(r['loads'])} |"
        for r in results
    ]
    if background:
        lines += [
            "",
            f"Saving in the background (`blocking=False`): training stands still for {_join_numbers(background['stalls'])} s; "
            f"the files are complete after {_join_numbers(background['written_after_s'])} s. The first save allocates the "
            f"host memory. Peak host memory of the whole benchmark: "
            f"{background['peak_host_gb']} GB. hasten syncs to the disk before it says saved and verifies before it "
            "loads; the others do neither, but where a row says synced.",
        ]
    return "\n".join(lines) + "\n"


def _join_numbers(numbers: list[float]) -> str:
    return ", ".join(f"{number:.2f}" for number in numbers)


if __name__ == "__main__":
    main()
