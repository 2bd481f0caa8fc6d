"""Models larger than the device: hasten beside Accelerate, taking turns in one process, against the link's own speed.

    python benchmarks/offload.py                 # an accelerator: about 20 GB of blocks, two minutes
    python benchmarks/offload.py --quick         # a quarter of it
    python benchmarks/offload.py --device cpu    # tiny, to see that it runs

Every part prints its rows as soon as it has them; all go to benchmarks/results (or --out) as JSON and Markdown, with the aims
and what was found. A part that fails is named and the others go on. The limit of an offloaded forward is the bytes of its
weights divided by the speed at which this machine copies page-locked memory to the device, measured in the same run. Outputs
are compared with those of the resident model bit for bit.. diffusers, if it is
not installed, may lie unpacked on PYTHONPATH; a peer that is missing is left out and named.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import shutil
import statistics
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from loading import installed_versions
from recording import record_run
from torch import Tensor, nn

from hasten.checkpoint.export import save_model
from hasten.extensions.bigmodel.dispatch import cpu_offload, dispatch_model
from hasten.extensions.bigmodel.load import load_checkpoint_in_model
from hasten.extensions.bigmodel.placed import end_dispatch

GB = 1e9
Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Aim:
    """A bound on a field of the first row of a section that has it."""

    says: str
    section: str
    field: str
    upper_bound: float | None = None
    lower_bound: float | None = None

    def found(self, rows: list[Row]) -> float | None:
        values = (
            row[self.field]
            for row in rows
            if row["part"] == self.section and self.field in row
        )
        return next((float(value) for value in values), None)

    def met(self, value: float) -> bool:
        above = self.lower_bound is None or value >= self.lower_bound
        return above and (self.upper_bound is None or value <= self.upper_bound)


AIMS = (
    Aim(
        "forward from host memory, of bytes / bandwidth of the link",
        "cpu forward",
        "of_limit",
        upper_bound=1.15,
    ),
    Aim(
        "its device memory over the activations, in blocks",
        "cpu forward",
        "peak_over_activations_blocks",
        upper_bound=3,
    ),
    Aim(
        "forward from files in the page cache, times Accelerate",
        "disk forward",
        "times_faster",
        lower_bound=3,
    ),
    Aim(
        "loading to the device, times Accelerate",
        "loading",
        "times_faster",
        lower_bound=2.5,
    ),
    Aim(
        "forward, times diffusers' group offloading with streams",
        "beside diffusers",
        "times_faster",
        lower_bound=1,
    ),
)


class Block(nn.Module):
    """The weights of a transformer block, used one after another."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = nn.Linear(width, 3 * width, bias=False)
        self.output = nn.Linear(width, width, bias=False)
        self.up, self.down = (
            nn.Linear(width, 4 * width, bias=False),
            nn.Linear(4 * width, width, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.attention(self.norm(x)).chunk(3, -1)
        x = x + self.output(torch.tanh(q + k) * v)
        return torch.as_tensor(x + self.down(torch.relu(self.up(x))))


class Stack(nn.Module):
    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Bench:
    """Sizes, the device, and the rows found so far."""

    def __init__(self, device: torch.device, quick: bool) -> None:
        self.device = device
        self.rows: list[Row] = []
        self.tiny = device.type == "cpu"
        self.width, self.depth, self.tokens = (
            (64, 6, 16) if self.tiny else (5120, 8 if quick else 32, 1024)
        )
        self.layers = 2 if self.tiny else 4 if quick else 16
        self.small_depth = 4 if self.tiny else 3 if quick else 11
        self.rounds = 2 if quick or self.tiny else 3
        self.bandwidth = 0.0
        self.quick = quick

    def add(self, **row: Any) -> None:
        self.rows.append(row)
        print(json.dumps(row), flush=True)

    def sync(self) -> None:
        if not self.tiny:
            torch.accelerator.synchronize(self.device)

    def timed(self, action: Callable[[], object]) -> float:
        self.sync()
        started = time.perf_counter()
        action()
        self.sync()
        return time.perf_counter() - started

    def turns(
        self, contenders: dict[str, Callable[[], object]], rounds: int | None = None
    ) -> dict[str, float]:
        """The median seconds of each, which take turns after one round that does not count."""
        times: dict[str, list[float]] = {name: [] for name in contenders}
        names = list(contenders)
        for turn in range((rounds or self.rounds) + 1):
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                seconds = self.timed(contenders[name])
                if turn:
                    times[name].append(seconds)
        return {
            name: statistics.median(contender_seconds)
            for name, contender_seconds in times.items()
        }

    def allocated(self) -> int:
        return 0 if self.tiny else int(torch.cuda.memory_allocated(self.device))

    def peak_over(self, action: Callable[[], object], base: int) -> int:
        """The most device memory during `action`, over `base`."""
        if self.tiny:
            action()
            return 0
        self.sync()
        torch.cuda.reset_peak_memory_stats(self.device)
        action()
        self.sync()
        return int(torch.cuda.max_memory_allocated(self.device)) - base


def original_accelerate() -> Any:
    """Hugging Face Accelerate itself; the drop-in, which has its name, would be hasten beside hasten."""
    import accelerate

    if "hasten" in accelerate.__version__:
        raise ImportError(
            "the drop-in stands in for Accelerate here; run in an environment with the original"
        )
    return accelerate


def build_stack(bench: Bench, depth: int) -> Stack:
    """A stack on the device, with weights that keep the numbers small."""
    torch.manual_seed(0)
    with bench.device:
        model = Stack(bench.width, depth).to(torch.bfloat16)
    return model.eval().requires_grad_(False)


def on_host(
    bench: Bench, source: nn.Module, empty: Callable[[], nn.Module]
) -> nn.Module:
    """A copy of a model in host memory; the system takes its time to give new memory, so several threads ask for it."""
    model, state = empty(), source.state_dict()
    with ThreadPoolExecutor(8) as pool:
        copies = pool.map(lambda tensor: tensor.to("cpu", copy=True), state.values())
        model.load_state_dict(dict(zip(state, copies, strict=True)), assign=True)
    # those that no state dict holds were computed on the device
    for name, buffer in source.named_buffers():
        owner, _, last = name.rpartition(".")
        model.get_submodule(owner)._buffers[last] = buffer.to("cpu", copy=True)
    return model.eval().requires_grad_(False)


def num_bytes(model: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in model.parameters())


def measure_bandwidth(bench: Bench) -> None:
    if bench.tiny:
        bench.bandwidth = 1e10
        return
    source = torch.empty(1024**3, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(1024**3, dtype=torch.uint8, device=bench.device)
    times = [
        bench.timed(lambda: target.copy_(source, non_blocking=True)) for _ in range(8)
    ]
    bench.bandwidth = 1024**3 / statistics.median(times[2:])
    bench.add(
        part="link",
        what="page-locked copy to the device",
        GBps=round(bench.bandwidth / GB, 2),
    )


def cpu_forward(bench: Bench) -> None:
    """A forward of blocks in host memory."""
    peer_offload = original_accelerate().cpu_offload
    resident = build_stack(bench, bench.depth)
    x = torch.randn(
        1, bench.tokens, bench.width, device=bench.device, dtype=torch.bfloat16
    )
    weights, block = num_bytes(resident), num_bytes(resident.blocks[0])
    empty = lambda: meta_stack(bench, bench.depth)  # noqa: E731
    offloaded_model, peer = (
        on_host(bench, resident, empty),
        on_host(bench, resident, empty),
    )
    initial_bytes = bench.allocated()
    activations = bench.peak_over(lambda: resident(x), initial_bytes)
    expected_output = resident(x)
    compute = bench.turns({"resident": lambda: resident(x)})["resident"]
    resident = Stack(1, 0)  # gives the weights back
    free_memory(bench)
    base = bench.allocated()
    pinning = bench.timed(lambda: cpu_offload(offloaded_model, bench.device))
    peer_offload(peer, bench.device)
    limit = weights / bench.bandwidth
    equal = bool(torch.equal(offloaded_model(x), expected_output)) and bool(
        torch.equal(offloaded_model(x), expected_output)
    )
    peak = bench.peak_over(lambda: offloaded_model(x), base)
    held_bytes = bench.allocated() - base
    times = bench.turns(
        {"hasten": lambda: offloaded_model(x), "Accelerate": lambda: peer(x)}
    )
    row = {
        "GB": round(weights / GB, 2),
        "limit_s": round(limit, 4),
        "resident_s": round(compute, 4),
    }
    over = {
        "peak_over_activations_blocks": round((peak - activations) / block, 2),
        "held_blocks": round(held_bytes / block, 2),
    }
    shares = {name: round(seconds / limit, 3) for name, seconds in times.items()}
    bench.add(
        part="cpu forward",
        what="hasten",
        seconds=times["hasten"],
        of_limit=shares["hasten"],
        bit_equal=equal,
        **row,
        **over,
        offload_s=round(pinning, 2),
    )
    bench.add(
        part="cpu forward",
        what="Accelerate",
        seconds=times["Accelerate"],
        of_limit=shares["Accelerate"],
        bit_equal=bool(torch.equal(peer(x), expected_output)),
    )
    end_dispatch(offloaded_model)


def meta_stack(bench: Bench, depth: int) -> Stack:
    with torch.device("meta"):
        return Stack(bench.width, depth).to(torch.bfloat16)


def free_memory(bench: Bench) -> None:
    gc.collect()
    if not bench.tiny:
        torch.cuda.empty_cache()


def beside_diffusers(bench: Bench) -> None:
    """The same blocks under diffusers' group offloading with streams, where that package can be imported."""
    try:
        from diffusers.hooks import apply_group_offloading

        if bench.tiny:
            raise RuntimeError("group offloading needs an accelerator")
    except Exception as error:  # whatever keeps it from working here, its row says so
        bench.add(
            part="beside diffusers",
            what=f"left out: {type(error).__name__}: {error}"[:300],
        )
        return
    source = build_stack(bench, bench.small_depth)
    x = torch.randn(1, 16, bench.width, device=bench.device, dtype=torch.bfloat16)
    expected_output = source(x)
    offloaded_model, rival = (
        on_host(bench, source, lambda: meta_stack(bench, bench.small_depth))
        for _ in range(2)
    )
    del source
    free_memory(bench)
    cpu_offload(offloaded_model, bench.device)
    apply_group_offloading(
        rival,
        onload_device=bench.device,
        offload_device=torch.device("cpu"),
        offload_type="block_level",
        num_blocks_per_group=1,
        use_stream=True,
        record_stream=True,
        non_blocking=True,
    )
    equal = bool(torch.equal(offloaded_model(x), expected_output)) and bool(
        torch.equal(offloaded_model(x), expected_output)
    )
    rival_is_equal = bool(torch.equal(rival(x), expected_output))
    times = bench.turns(
        {"hasten": lambda: offloaded_model(x), "diffusers": lambda: rival(x)}, rounds=7
    )
    bench.add(
        part="beside diffusers",
        what="group offloading with streams, same blocks",
        hasten_s=times["hasten"],
        diffusers_s=times["diffusers"],
        of_limit=round(
            times["hasten"] * bench.bandwidth / num_bytes(offloaded_model), 3
        ),
        times_faster=round(times["diffusers"] / times["hasten"], 3),
        bit_equal=equal,
        diffusers_equal=rival_is_equal,
    )
    end_dispatch(offloaded_model)


def disk_and_loading(bench: Bench, folder: Path) -> None:
    """Files in the page cache: loading them to the device, and forwards that stream from them."""
    accelerate = original_accelerate()
    depth = bench.small_depth
    source = build_stack(bench, depth)
    x = torch.randn(
        1, bench.tokens, bench.width, device=bench.device, dtype=torch.bfloat16
    )
    expected_output = source(x)
    weights = num_bytes(source)
    save_model(source.state_dict(), folder / "model", max_shard_size="2GB")
    peer = on_host(bench, source, lambda: meta_stack(bench, depth))
    del source
    free_memory(bench)
    target_device: Any = "cpu" if bench.tiny else 0
    loaded_models: dict[str, nn.Module] = {}

    def load_ours() -> None:
        loaded_models["hasten"] = meta_stack(bench, depth)
        load_checkpoint_in_model(
            loaded_models["hasten"], folder / "model", {"": target_device}, strict=True
        )

    def load_peer() -> None:
        with accelerate.init_empty_weights():
            loaded_models["Accelerate"] = Stack(bench.width, depth).to(torch.bfloat16)
        accelerate.load_checkpoint_in_model(
            loaded_models["Accelerate"], str(folder / "model"), {"": target_device}
        )

    times = bench.turns({"hasten": load_ours, "Accelerate": load_peer})
    equal = bool(torch.equal(loaded_models["hasten"](x), expected_output))
    bench.add(
        part="loading",
        what=f"{weights / GB:.1f} GB of safetensors to the device",
        hasten_s=times["hasten"],
        Accelerate_s=times["Accelerate"],
        GBps=round(weights / GB / times["hasten"], 2),
        times_faster=round(times["Accelerate"] / times["hasten"], 2),
        bit_equal=equal,
    )
    loaded_models.clear()
    free_memory(bench)
    streamed_model = meta_stack(bench, depth)
    dispatch_model(
        streamed_model,
        {"": "disk"},
        main_device=target_device,
        offload_dir=folder / "model",
    )
    accelerate.disk_offload(peer, str(folder / "peer"), bench.device)
    with torch.no_grad():
        equal = bool(torch.equal(streamed_model(x), expected_output)) and bool(
            torch.equal(streamed_model(x), expected_output)
        )
        times = bench.turns(
            {"hasten": lambda: streamed_model(x), "Accelerate": lambda: peer(x)}
        )
    bench.add(
        part="disk forward",
        what=f"{weights / GB:.1f} GB in the page cache",
        hasten_s=times["hasten"],
        Accelerate_s=times["Accelerate"],
        GBps=round(weights / GB / times["hasten"], 2),
        times_faster=round(times["Accelerate"] / times["hasten"], 2),
        bit_equal=equal,
    )
    end_dispatch(streamed_model)


def judge_aims(rows: list[Row], aims: tuple[Aim, ...]) -> list[Row]:
    """Every aim with what was found, and whether all compared outputs were equal."""
    judged: list[Row] = []
    for aim in aims:
        bound = (
            f"at most {aim.upper_bound:g}"
            if aim.upper_bound is not None
            else f"at least {aim.lower_bound:g}"
        )
        value = aim.found(rows)
        judged.append(
            {
                "aim": aim.says,
                "bound": bound,
                "found": value,
                "met": None if value is None else aim.met(value),
            }
        )
    equal = [bool(row["bit_equal"]) for row in rows if "bit_equal" in row]
    equal_share = f"{sum(equal)} of {len(equal)}"
    judged.append(
        {
            "aim": "outputs equal, bit for bit",
            "bound": "all",
            "found": equal_share,
            "met": all(equal) if equal else None,
        }
    )
    return judged


def write_results(
    bench: Bench,
    benchmark: str,
    out: Path | None,
    seconds: float,
    title: str,
    aims: tuple[Aim, ...],
) -> None:
    """Record the rows and the aims."""
    platform_versions = {
        **installed_versions(bench.device.type),
        "seconds": str(round(seconds)),
    }
    judged = judge_aims(bench.rows, aims)
    lines = [
        f"# {title}",
        "",
        ", ".join(f"{key} {value}" for key, value in platform_versions.items()),
        "",
    ]
    if bench.tiny:
        lines += [
            "A tiny model on the CPU, to see that it runs; the bounds are meant for an accelerator.",
            "",
        ]
    lines += ["| aim | bound | found | met |", "|---|---|---|---|"]
    words = {None: "not measured", True: "yes", False: "no"}
    for judgement in judged:
        lines.append(
            f"| {judgement['aim']} | {judgement['bound']} | {_cell(judgement['found'])} | {words[judgement['met']]} |"
        )
    print("\n".join(lines[-len(judged) - 2 :]), flush=True)
    lines.append("")
    for row in bench.rows:
        details = ", ".join(
            f"{key} {_cell(value)}"
            for key, value in row.items()
            if key not in ("part", "what")
        )
        lines.append(
            f"- **{row['part']}** ({row['what']}){': ' if details else ''}{details}"
        )
    measurements = {"aims": judged, "rows": bench.rows}
    record_run(
        benchmark,
        bench.device.type,
        measurements,
        "\n".join(lines),
        platform_versions,
        out,
    )


def _cell(value: object) -> str:
    return (
        f"{value:.4g}"
        if isinstance(value, float)
        else "–"
        if value is None
        else str(value)
    )


def measure_sections(
    bench: Bench, sections: dict[str, Callable[[Bench], None]]
) -> list[str]:
    """Take every part in turn; the names of those that failed."""
    failed = []
    with torch.no_grad():
        measure_bandwidth(bench)
        for name, section in sections.items():
            start_time = time.perf_counter()
            try:
                section(bench)
            except Exception as error:  # the other parts are worth having all the same
                failed.append(name)
                bench.add(
                    part=name, what=f"failed: {type(error).__name__}: {error}"[:500]
                )
                traceback.print_exc()
            free_memory(bench)
            print(f"  {name}: {time.perf_counter() - start_time:.0f} s", flush=True)
    return failed


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """The options both benchmarks of offloading take."""
    warnings.filterwarnings("ignore")
    logging.basicConfig(level=logging.WARNING, format="  %(message)s")
    logging.getLogger("hasten").setLevel(logging.INFO)
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path, help="folder for the results")
    return parser


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--parts", nargs="*", default=["cpu", "disk", "diffusers"])
    parser.add_argument("--depth", type=int, help="blocks of the model (32 of 0.63 GB)")
    args = parser.parse_args()
    device = (
        torch.device(args.device, 0) if args.device != "cpu" else torch.device("cpu")
    )
    bench = Bench(device, args.quick)
    bench.depth = args.depth or bench.depth
    started = time.perf_counter()
    folder = Path(tempfile.mkdtemp(prefix="hasten-offload-"))
    sections: dict[str, Callable[[Bench], None]] = {
        "cpu": cpu_forward,
        "disk": lambda b: disk_and_loading(b, folder),
        "diffusers": beside_diffusers,
    }
    try:
        failed = measure_sections(bench, {name: sections[name] for name in args.parts})
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        write_results(
            bench,
            "offload",
            args.out,
            time.perf_counter() - started,
            "Offloaded models",
            AIMS,
        )
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
