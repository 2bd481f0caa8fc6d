"""Loading of safetensors from the disk, and again from the page cache: hasten beside Accelerate and bare safetensors.

    python benchmarks/cold_loading.py --device cuda      # one GPU: 6.5 GB, at most 85 seconds
    python benchmarks/cold_loading.py --device cpu       # 1 GB into host memory
    python benchmarks/cold_loading.py --starts           # the same files in three fresh processes, one after the other, by every contender

Every contender of every round loads files of its own, which are written, synced and dropped from the page cache before, since a disk (or
the host of a virtual one) may answer a second read from a cache of its own. The share that the page cache still holds is measured before
each cold load. The same files are then read once and loaded again, warm. Models are built on the meta device outside of the clock, each
contender loads a small model first, and the loaded weights are compared with the saved ones bit for bit. On the CPU a contender may leave
weights mapped to their file, so one byte of each page is read inside the clock. A new round begins only if it
fits into --seconds. A peer that is missing is left out and named.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import json
import mmap
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from loading import installed_versions
from offload import Stack, original_accelerate
from recording import record_run
from torch import nn

from hasten.checkpoint.export import save_model
from hasten.extensions.bigmodel.load import load_checkpoint_in_model

GB = 1e9
MIB = 2**20
Load = Callable[[nn.Module, Path], object]


# -- the page cache ---------------------------------------------------------------------------------------------------
def cached_share(path: Path) -> float:
    """The share of a file's pages that the page cache holds; nan where the system does not tell."""
    size = path.stat().st_size
    with (
        path.open("rb") as file,
        contextlib.closing(mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ)) as view,
    ):
        page_flags = np.zeros(-(-size // mmap.PAGESIZE), np.uint8)
        data = np.frombuffer(view, np.uint8)
        failed = ctypes.CDLL(None).mincore(
            ctypes.c_void_p(data.ctypes.data),
            ctypes.c_size_t(size),
            ctypes.c_void_p(page_flags.ctypes.data),
        )
        del data
        return float("nan") if failed else float((page_flags & 1).mean())


def drop_from_page_cache(paths: list[Path]) -> float:
    """Sync files and drop them from the page cache; the largest share that stayed."""
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)
    left = max(map(cached_share, paths))
    if not left < 0.01:  # some systems take the advice as none
        with contextlib.suppress(OSError):
            Path("/proc/sys/vm/drop_caches").write_text("3")
        left = max(map(cached_share, paths))
    return left


def read_once(paths: list[Path]) -> None:
    """Read the files, so that the page cache holds them."""
    with ThreadPoolExecutor(16) as pool:
        for path in paths:
            spans = range(0, path.stat().st_size, 64 * MIB)
            list(pool.map(lambda offset, path=path: _read_span(path, offset), spans))


def _read_span(path: Path, offset: int) -> None:
    with path.open("rb", buffering=0) as file:
        file.seek(offset)
        memory = bytearray(16 * MIB)
        for _ in range(4):
            file.readinto(memory)


# -- the contenders ---------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Sizes:
    """A model of about so many bytes, and its device."""

    width: int
    depth: int
    device: torch.device

    def empty(self, depth: int | None = None) -> Stack:
        with torch.device("meta"):
            return Stack(self.width, depth or self.depth).to(torch.bfloat16)

    def filled(self, depth: int | None = None) -> Stack:
        torch.manual_seed(0)
        with self.device:
            return (
                Stack(self.width, depth or self.depth)
                .to(torch.bfloat16)
                .requires_grad_(False)
            )

    def sync(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)


def choose_sizes(device: torch.device, gigabytes: float) -> Sizes:
    width = 1024 if device.type == "cpu" else 5120
    return Sizes(width, max(1, round(gigabytes * GB / (24 * width**2))), device)


def installed_contenders(device: torch.device) -> dict[str, Load]:
    """Those that are installed."""
    target_device: Any = "cpu" if device.type == "cpu" else device.index or 0

    def hasten(model: nn.Module, folder: Path) -> object:
        return load_checkpoint_in_model(model, folder, {"": target_device}, strict=True)

    load_functions: dict[str, Load] = {"hasten": hasten}
    try:
        accelerate = original_accelerate()
        load_functions["Accelerate"] = lambda model, folder: (
            accelerate.load_checkpoint_in_model(model, str(folder), {"": target_device})
        )
    except ImportError as error:
        print(f"  Accelerate left out: {error}", file=sys.stderr)
    try:
        from safetensors.torch import load_file
    except ImportError as error:
        print(f"  safetensors left out: {error}", file=sys.stderr)
        return load_functions

    def bare(model: nn.Module, folder: Path) -> object:
        for path in sorted(folder.glob("*.safetensors")):
            model.load_state_dict(
                load_file(path, device=str(device)), strict=False, assign=True
            )
        return model

    load_functions["safetensors"] = bare
    return load_functions


def time_load(
    size: Sizes, load: Load, folder: Path, depth: int | None = None
) -> tuple[float, float, nn.Module]:
    """Seconds by the clock and of the process's processors, and the loaded model."""
    model = size.empty(depth)
    gc.collect()
    size.sync()
    start_time, used = time.perf_counter(), processor_s()
    load(model, folder)
    if size.device.type == "cpu":
        touch_pages(model)
    size.sync()
    return time.perf_counter() - start_time, processor_s() - used, model


def touch_pages(model: nn.Module) -> None:
    """Read a byte of every page, because some contenders map files into memory, which are read when they are used."""
    for parameter in model.parameters():
        parameter.detach().view(-1).view(torch.uint8)[:: mmap.PAGESIZE].sum()


def processor_s() -> float:
    spent = resource.getrusage(resource.RUSAGE_SELF)
    return spent.ru_utime + spent.ru_stime


def has_equal_weights(model: nn.Module, source: nn.Module) -> bool:
    source_parameters = dict(source.named_parameters())
    return all(
        torch.equal(loaded_parameter, source_parameters[name])
        for name, loaded_parameter in model.named_parameters()
    )


def one_turn(size: Sizes, load: Load, source: Stack, folder: Path) -> dict[str, Any]:
    """A cold and a warm load of fresh files."""
    try:
        save_model(source.state_dict(), folder, max_shard_size="2GB")
        files = sorted(folder.glob("*.safetensors"))
        left = drop_from_page_cache(files)
        cold, cold_cpu, model = time_load(size, load, folder)
        equal = has_equal_weights(model, source)
        cached_after = statistics.mean(map(cached_share, files))
        del model
        read_once(files)
        warm, warm_cpu, model = time_load(size, load, folder)
        return {
            "cold_s": round(cold, 3),
            "cold_processor_s": round(cold_cpu, 3),
            "warm_s": round(warm, 3),
            "warm_processor_s": round(warm_cpu, 3),
            "cached_before": round(left, 3),
            "cached_after": round(cached_after, 3),
            "bit_equal": equal and has_equal_weights(model, source),
        }
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def run_rounds(
    size: Sizes,
    load_functions: dict[str, Load],
    folder: Path,
    seconds: float,
    max_rounds: int,
) -> list[dict[str, Any]]:
    """Turns of all contenders, in changing order, while another round fits."""
    start_time = time.perf_counter()
    source, rows = size.filled(), list[dict[str, Any]]()
    with warm_up(size, folder) as small:
        for load in load_functions.values():
            time_load(size, load, small, 1)
    longest, names = 0.0, list(load_functions)
    for number in range(max_rounds):
        started = time.perf_counter()
        if number and started - start_time + longest > seconds:
            break
        for name in names[number % len(names) :] + names[: number % len(names)]:
            rows.append(
                {
                    "round": number,
                    "contender": name,
                    **one_turn(size, load_functions[name], source, folder / "files"),
                }
            )
            print(json.dumps(rows[-1]), flush=True)
        longest = max(longest, time.perf_counter() - started)
    return rows


@contextlib.contextmanager
def warm_up(size: Sizes, folder: Path) -> Iterator[Path]:
    """A folder with a small model, for what a first load does once for the process."""
    small = folder / "small"
    save_model(size.filled(1).state_dict(), small, max_shard_size="2GB")
    try:
        yield small
    finally:
        shutil.rmtree(small)


# -- fresh processes --------------------------------------------------------------------------------------------------
def measure_starts(
    size: Sizes, arguments: list[str], folder: Path
) -> list[dict[str, Any]]:
    """The first load of three fresh processes, one after the other, from files that the page cache does not hold before the first."""
    source, rows = size.filled(), list[dict[str, Any]]()
    for name in installed_contenders(size.device):
        files = folder / "files"
        save_model(source.state_dict(), files, max_shard_size="2GB")
        left = drop_from_page_cache(sorted(files.glob("*.safetensors")))
        for start in range(3):
            command = [
                sys.executable,
                __file__,
                *arguments,
                "--once",
                name,
                "--files",
                str(files),
            ]
            ended = subprocess.run(command, capture_output=True, text=True, check=True)
            row = {
                "contender": name,
                "start": start + 1,
                "cached_before": round(left, 3),
            }
            rows.append(row | json.loads(ended.stdout.strip().splitlines()[-1]))
            print(json.dumps(rows[-1]), flush=True)
        shutil.rmtree(files)
    return rows


def load_once(size: Sizes, name: str, files: Path) -> dict[str, Any]:
    """Load in this process, whose device has been started before the clock."""
    load = installed_contenders(size.device)[name]
    torch.zeros(1, device=size.device).item()
    seconds, processor, _ = time_load(size, load, files)
    return {"seconds": round(seconds, 3), "processor_s": round(processor, 3)}


# -- the report -------------------------------------------------------------------------------------------------------
def compute_medians(rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Median seconds of each contender, cold and warm, and how often each is as fast as Accelerate."""
    table: dict[str, dict[str, float]] = {}
    for name in dict.fromkeys(row["contender"] for row in rows):
        contender_rows = [row for row in rows if row["contender"] == name]
        table[name] = {
            key: statistics.median(row[key] for row in contender_rows)
            for key in ("cold_s", "warm_s")
        }
    if peer := table.get("Accelerate"):
        for median_row in table.values():
            median_row |= {
                f"{kind} × Accelerate": round(
                    peer[f"{kind}_s"] / median_row[f"{kind}_s"], 2
                )
                for kind in ("cold", "warm")
            }
    return table


def format_page(measurements: dict[str, Any], platform_versions: dict[str, str]) -> str:
    lines = [
        "# Cold and warm loads of safetensors",
        "",
        ", ".join(f"{key} {value}" for key, value in platform_versions.items()),
        "",
    ]
    if measurements.get("rows"):
        lines += [
            f"{measurements['gigabytes']:.2f} GB to {measurements['device']}, {measurements['rounds']} rounds in turns, medians by the clock; at most "
            f"{max(row['cached_before'] for row in measurements['rows']):.0%} of a file in the page cache before a cold load; weights "
            f"{'equal' if all(row['bit_equal'] for row in measurements['rows']) else 'NOT EQUAL'} to the saved ones, bit for bit.",
            "",
            "| | cold (s) | warm (s) | cold, × as fast as Accelerate | warm |",
            "|---|---|---|---|---|",
        ]
        for name, row in measurements["medians"].items():
            faster = [row.get(f"{kind} × Accelerate") for kind in ("cold", "warm")]
            cells = [
                f"{row['cold_s']:.2f}",
                f"{row['warm_s']:.2f}",
                *("" if x is None else f"{x:.2f}" for x in faster),
            ]
            lines.append(f"| {name} | {' | '.join(cells)} |")
    if measurements.get("starts"):
        lines += [
            f"{measurements['gigabytes']:.2f} GB to {measurements['device']}, the first load of three fresh processes one after the other (s):",
            "",
            "| | first start, cold | second | third |",
            "|---|---|---|---|",
        ]
        for name in dict.fromkeys(row["contender"] for row in measurements["starts"]):
            seconds = [
                f"{row['seconds']:.2f}"
                for row in measurements["starts"]
                if row["contender"] == name
            ]
            lines.append(f"| {name} | {' | '.join(seconds)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument(
        "--gigabytes", type=float, help="size of the model (6.5, on the CPU 1)"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--seconds", type=float, default=70, help="no new round that would end later"
    )
    parser.add_argument(
        "--folder",
        type=Path,
        help="a folder on the disk to measure, instead of the temporary one",
    )
    parser.add_argument(
        "--starts", action="store_true", help="three fresh processes for each contender"
    )
    parser.add_argument(
        "--once", help="load with this contender in this process, and print the seconds"
    )
    parser.add_argument("--files", type=Path, help="the files that --once loads")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    device = (
        torch.device("cpu") if args.device == "cpu" else torch.device(args.device, 0)
    )
    size = choose_sizes(
        device, args.gigabytes or (1.0 if device.type == "cpu" else 6.5)
    )
    if args.once:
        print(json.dumps(load_once(size, args.once, args.files)))
        return
    folder = Path(tempfile.mkdtemp(prefix="hasten-loads-", dir=args.folder))
    measurements: dict[str, Any] = {"device": device.type}
    try:
        if args.starts:
            measurements["gigabytes"] = size.depth * 24 * size.width**2 / GB
            arguments = [
                "--device",
                args.device,
                *(["--gigabytes", str(args.gigabytes)] if args.gigabytes else []),
            ]
            measurements["starts"] = measure_starts(size, arguments, folder)
        else:
            measurements["gigabytes"] = size.depth * 24 * size.width**2 / GB
            measurements["rows"] = run_rounds(
                size, installed_contenders(device), folder, args.seconds, args.rounds
            )
            measurements["rounds"] = measurements["rows"][-1]["round"] + 1
            measurements["medians"] = compute_medians(measurements["rows"])
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    platform_versions = installed_versions(device.type)
    print(format_page(measurements, platform_versions))
    setting = f"starts, {device.type}" if args.starts else device.type
    record_run(
        "cold_loading",
        setting,
        measurements,
        format_page(measurements, platform_versions),
        platform_versions,
        args.out,
    )


if __name__ == "__main__":
    main()
