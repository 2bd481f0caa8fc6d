"""What the benchmarks of data loading share: the contenders, turns taken in one process, and the report."""

from __future__ import annotations

import gc
import os
import platform
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from importlib import metadata
from typing import Any

import torch
from recording import record_run
from torch.utils.data import DataLoader

REFERENCE = "bare torch"


def read_bare(loader: DataLoader[Any], device: torch.device, **_: Any) -> Iterable[Any]:
    """The loop a careful person writes: batches moved when they come, without waiting where memory is pinned."""
    if device.type == "cpu":
        return loader

    class Moving:
        def __iter__(self) -> Any:
            for batch in loader:
                yield {
                    key: value.to(device, non_blocking=True)
                    for key, value in batch.items()
                }

    return Moving()


def hasten(
    loader: DataLoader[Any], device: torch.device, **settings: Any
) -> Iterable[Any]:
    from hasten import Accelerator, DataLoaderConfiguration

    config = DataLoaderConfiguration(**settings)
    prepared: Iterable[Any] = Accelerator(
        cpu=device.type == "cpu", dataloader_config=config
    ).prepare(loader)
    return prepared


def accelerate(
    loader: DataLoader[Any], device: torch.device, **settings: Any
) -> Iterable[Any]:
    import accelerate

    if "hasten" in accelerate.__version__:
        raise ImportError(
            "the drop-in stands in for Accelerate here; run in an environment with the original"
        )
    return read_with_accelerate(loader, device, **settings)


def read_with_accelerate(
    loader: DataLoader[Any], device: torch.device, **settings: Any
) -> Iterable[Any]:
    """The package named `accelerate`, be it the original or the drop-in."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
    from accelerate.utils import DataLoaderConfiguration

    # its settings are one per process
    AcceleratorState._reset_state(reset_partial_state=True)
    config = DataLoaderConfiguration(non_blocking=True, **settings)
    prepared: Iterable[Any] = Accelerator(
        cpu=device.type == "cpu", dataloader_config=config
    ).prepare(loader)
    return prepared


def fabric(loader: DataLoader[Any], device: torch.device, **_: Any) -> Iterable[Any]:
    from lightning.fabric import Fabric

    runner = Fabric(accelerator=device.type, devices=1)
    prepared: Iterable[Any] = runner.setup_dataloaders(loader)
    return prepared


CONTENDERS: dict[str, Callable[..., Iterable[Any]]] = {
    REFERENCE: read_bare,
    "hasten": hasten,
    "Accelerate": accelerate,
    "Fabric": fabric,
}


def prepared_by_all(
    make: Callable[[], DataLoader[Any]], device: torch.device
) -> dict[str, Iterable[Any]]:
    """A fresh loader prepared by every contender that is installed."""
    warnings.filterwarnings("ignore")
    loaders = {}
    for name, prepare in CONTENDERS.items():
        try:
            loaders[name] = prepare(make(), device)
        except ImportError as error:
            print(f"  {name} left out: {error}", file=sys.stderr)
    return loaders


def take_turns(
    passes: dict[str, Callable[[], int]],
    rounds: int,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Seconds a batch in each round; a pass returns the number of its batches, and the contenders alternate."""
    times: dict[str, list[float]] = {name: [] for name in passes}
    names = list(passes)
    gc.collect()
    gc.disable()
    for turn in range(rounds + 1):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            start_time = clock()
            count = passes[name]()
            if turn:
                times[name].append((clock() - start_time) / count)
    gc.enable()
    return times


def summarize_times(
    times: dict[str, list[float]], reference: str = REFERENCE
) -> dict[str, dict[str, float]]:
    """Median milliseconds, and the median of the rounds' ratios to the reference."""
    base = times[reference]
    return {
        name: {
            "milliseconds": statistics.median(seconds) * 1e3,
            "ratio": statistics.median(
                a / b for a, b in zip(seconds, base, strict=True)
            ),
        }
        for name, seconds in times.items()
    }


def installed_versions(device: str = "cpu") -> dict[str, str]:
    package_versions = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cores": str(os.cpu_count()),
    }
    for name in ("accelerate", "lightning"):
        try:
            package_versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    if device == "cuda":
        package_versions["hardware"] = torch.cuda.get_device_name()
    package_versions["date"] = datetime.now(UTC).strftime("%Y-%m-%d")
    return package_versions


def report_rows(
    name: str, title: str, rows: list[dict[str, Any]], device: str = "cpu"
) -> None:
    """Print the rows, and write them to the results as JSON and Markdown."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    platform_versions = installed_versions(device)
    lines = [
        f"# {title}",
        "",
        ", ".join(f"{key} {value}" for key, value in platform_versions.items()),
        "",
    ]
    lines += ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    for row in rows:
        lines.append(
            "| " + " | ".join(_cell(row.get(column, "–")) for column in columns) + " |"
        )
        print(
            ", ".join(f"{key}: {_cell(value)}" for key, value in row.items()),
            flush=True,
        )
    record_run(name, device, {"rows": rows}, "\n".join(lines), platform_versions)


def _cell(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
