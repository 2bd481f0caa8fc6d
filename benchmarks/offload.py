"""Models larger than the device: hasten beside Accelerate, taking turns in one process, against the link's own speed.

    python benchmarks/offload.py                 # an accelerator: about 20 GB of blocks, five minutes
    python benchmarks/offload.py --quick         # a tenth of it
    python benchmarks/offload.py --device cpu    # tiny, to see that it runs

Every part prints its rows as soon as it has them; all go to benchmarks/results (or --out) as JSON and Markdown. The limit of
an offloaded forward is the bytes of its weights divided by the speed at which this machine copies page-locked memory to
the device, measured in the same run. Outputs are compared with those of the resident model bit for bit.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import resource
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from loading import RESULTS, versions
from torch import Tensor, nn

from hasten.bigmodel.dispatch import cpu_offload, dispatch_model
from hasten.bigmodel.load import load_checkpoint_in_model
from hasten.bigmodel.meta import init_empty_weights
from hasten.bigmodel.placed import detach
from hasten.checkpoint.export import save_model

GB = 1e9
Row = dict[str, Any]


class Block(nn.Module):
    """The weights of a transformer block, used one after another."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = nn.Linear(width, 3 * width, bias=False)
        self.output = nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

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
        self.width, self.depth, self.tokens = (64, 6, 16) if self.tiny else (5120, 8 if quick else 32, 1024)
        self.small_depth = 4 if self.tiny else 3 if quick else 10
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

    def turns(self, contenders: dict[str, Callable[[], object]], rounds: int | None = None) -> dict[str, float]:
        """The median seconds of each, which take turns after one round that does not count."""
        times: dict[str, list[float]] = {name: [] for name in contenders}
        names = list(contenders)
        for turn in range((rounds or self.rounds) + 1):
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                seconds = self.timed(contenders[name])
                if turn:
                    times[name].append(seconds)
        return {name: statistics.median(found) for name, found in times.items()}

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


def build(bench: Bench, depth: int) -> Stack:
    """A stack on the device, with weights that keep the numbers small."""
    torch.manual_seed(0)
    with bench.device:
        model = Stack(bench.width, depth).to(torch.bfloat16)
    return model.eval().requires_grad_(False)


def on_host(bench: Bench, source: nn.Module, empty: Callable[[], nn.Module]) -> nn.Module:
    """A copy of a model in host memory."""
    model = empty()
    model.load_state_dict(
        {name: tensor.to("cpu", copy=True) for name, tensor in source.state_dict().items()}, assign=True
    )
    for name, buffer in source.named_buffers():  # those that no state dict holds were computed on the device
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
    times = [bench.timed(lambda: target.copy_(source, non_blocking=True)) for _ in range(8)]
    bench.bandwidth = 1024**3 / statistics.median(times[2:])
    bench.add(part="link", what="page-locked copy to the device", GBps=round(bench.bandwidth / GB, 2))


def cpu_forward(bench: Bench) -> None:
    """A forward of blocks in host memory: all streamed, and half of them resident."""
    from accelerate import cpu_offload as peer_offload

    resident = build(bench, bench.depth)
    x = torch.randn(1, bench.tokens, bench.width, device=bench.device, dtype=torch.bfloat16)
    weights, block = num_bytes(resident), num_bytes(resident.blocks[0])
    empty = lambda: meta(bench, bench.depth)  # noqa: E731
    ours, peer = on_host(bench, resident, empty), on_host(bench, resident, empty)
    before = bench.allocated()
    activations = bench.peak_over(lambda: resident(x), before)
    wanted = resident(x)
    compute = bench.turns({"resident": lambda: resident(x)})["resident"]
    resident = Stack(1, 0)  # gives the weights back
    free(bench)
    base = bench.allocated()
    pinning = bench.timed(lambda: cpu_offload(ours, bench.device))
    peer_offload(peer, bench.device)
    limit = weights / bench.bandwidth
    equal = bool(torch.equal(ours(x), wanted)) and bool(torch.equal(ours(x), wanted))
    peak = bench.peak_over(lambda: ours(x), base)
    held = bench.allocated() - base
    times = bench.turns({"hasten": lambda: ours(x), "Accelerate": lambda: peer(x)})
    row = {"GB": round(weights / GB, 2), "limit_s": round(limit, 4), "resident_s": round(compute, 4)}
    over = {
        "peak_over_activations_blocks": round((peak - activations) / block, 2),
        "held_blocks": round(held / block, 2),
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
        bit_equal=bool(torch.equal(peer(x), wanted)),
    )
    peer = nn.Module()  # gives its weights back
    free(bench)
    detach(ours)
    cpu_offload(ours, bench.device, resident=weights // 2)
    equal = bool(torch.equal(ours(x), wanted)) and bool(torch.equal(ours(x), wanted))
    half = bench.turns({"hasten": lambda: ours(x)})["hasten"]
    bench.add(
        part="half resident",
        what="hasten",
        seconds=half,
        of_all_streamed=round(half / times["hasten"], 3),
        of_limit=round(half / limit, 3),
        bit_equal=equal,
    )
    detach(ours)


def meta(bench: Bench, depth: int) -> Stack:
    with torch.device("meta"):
        return Stack(bench.width, depth).to(torch.bfloat16)


def free(bench: Bench) -> None:
    gc.collect()
    if not bench.tiny:
        torch.cuda.empty_cache()


def growth(bench: Bench) -> None:
    """Fifty forwards leave device and host memory as they were."""
    source = build(bench, bench.small_depth)
    model = on_host(bench, source, lambda: meta(bench, bench.small_depth))
    x = torch.randn(1, 16, bench.width, device=bench.device, dtype=torch.bfloat16)
    wanted = source(x)
    del source
    free(bench)
    cpu_offload(model, bench.device)
    for _ in range(5):
        model(x)
    bench.sync()
    device, host = bench.allocated(), rss()
    equal = all(bool(torch.equal(model(x), wanted)) for _ in range(50))
    bench.sync()
    bench.add(
        part="growth",
        what="hasten, 50 forwards",
        device_bytes=bench.allocated() - device,
        host_MB=round((rss() - host) / 1e6, 1),
        bit_equal=equal,
    )
    if (rival := group_offloading(bench, model, x)) is not None:
        bench.add(**rival)
    detach(model)


def rss() -> int:
    status = Path("/proc/self/statm")
    if status.is_file():
        return int(status.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def group_offloading(bench: Bench, ours: nn.Module, x: Tensor) -> Row | None:
    """The same blocks under diffusers' group offloading with streams, where that package is installed."""
    try:
        from diffusers.hooks import apply_group_offloading
    except Exception as error:  # whatever keeps it from working here, its row is left out
        print(f"diffusers left out: {type(error).__name__}: {error}"[:300], flush=True)
        return None
    try:
        rival = build(bench, bench.small_depth).cpu()
        settings = {"offload_device": torch.device("cpu"), "offload_type": "block_level", "num_blocks_per_group": 1}
        apply_group_offloading(rival, onload_device=bench.device, use_stream=not bench.tiny, **settings)
        times = bench.turns({"hasten": lambda: ours(x), "diffusers": lambda: rival(x)}, rounds=5)
    except Exception as error:  # the same
        print(f"diffusers left out: {type(error).__name__}: {error}"[:300], flush=True)
        return None
    return {
        "part": "beside diffusers",
        "what": "group offloading with streams, same blocks",
        "hasten_s": times["hasten"],
        "diffusers_s": times["diffusers"],
        "times_faster": round(times["diffusers"] / times["hasten"], 2),
    }


def disk_and_loading(bench: Bench, folder: Path) -> None:
    """Files in the page cache: loading them to the device, and forwards that stream from them."""
    import accelerate

    depth = bench.small_depth if not bench.tiny else 4
    source = build(bench, depth)
    x = torch.randn(1, bench.tokens, bench.width, device=bench.device, dtype=torch.bfloat16)
    wanted = source(x)
    weights = num_bytes(source)
    save_model(source.state_dict(), folder / "model", max_shard_size="2GB")
    peer = on_host(bench, source, lambda: meta(bench, depth))
    del source
    free(bench)
    place: Any = "cpu" if bench.tiny else 0
    found: dict[str, nn.Module] = {}

    def load_ours() -> None:
        found["hasten"] = meta(bench, depth)
        load_checkpoint_in_model(found["hasten"], folder / "model", {"": place}, strict=True)

    def load_peer() -> None:
        with accelerate.init_empty_weights():
            found["Accelerate"] = Stack(bench.width, depth).to(torch.bfloat16)
        accelerate.load_checkpoint_in_model(found["Accelerate"], str(folder / "model"), {"": place})

    times = bench.turns({"hasten": load_ours, "Accelerate": load_peer})
    equal = bool(torch.equal(found["hasten"](x), wanted))
    bench.add(
        part="loading",
        what=f"{weights / GB:.1f} GB of safetensors to the device",
        hasten_s=times["hasten"],
        Accelerate_s=times["Accelerate"],
        GBps=round(weights / GB / times["hasten"], 2),
        times_faster=round(times["Accelerate"] / times["hasten"], 2),
        bit_equal=equal,
    )
    found.clear()
    free(bench)
    ours = meta(bench, depth)
    dispatch_model(ours, {"": "disk"}, main_device=place, offload_dir=folder / "model")
    accelerate.disk_offload(peer, str(folder / "peer"), bench.device)
    with torch.no_grad():
        equal = bool(torch.equal(ours(x), wanted)) and bool(torch.equal(ours(x), wanted))
        times = bench.turns({"hasten": lambda: ours(x), "Accelerate": lambda: peer(x)})
    bench.add(
        part="disk forward",
        what=f"{weights / GB:.1f} GB in the page cache",
        hasten_s=times["hasten"],
        Accelerate_s=times["Accelerate"],
        GBps=round(weights / GB / times["hasten"], 2),
        times_faster=round(times["Accelerate"] / times["hasten"], 2),
        bit_equal=equal,
    )
    detach(ours)


def outputs_of(model: nn.Module, ids: Tensor) -> dict[str, Tensor]:
    """What the modules of a model return in one forward, by name."""
    found: dict[str, Tensor] = {}

    def keep(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            first = output[0] if isinstance(output, tuple) else output
            if isinstance(first, Tensor):
                found.setdefault(name, first.detach().clone())

        return hook

    handles = [module.register_forward_hook(keep(name)) for name, module in model.named_modules() if name]
    model(ids)
    for handle in handles:
        handle.remove()
    return found


def first_difference(wanted: dict[str, Tensor], found: dict[str, Tensor]) -> str:
    """The first module whose output differs, in the order in which they finish."""
    return next(
        (name for name, value in wanted.items() if not torch.equal(value, found[name].to(value.device))), "none"
    )


def pinning(bench: Bench) -> None:
    """Ways to take page-locked memory, per GB."""
    if bench.tiny:
        return
    import numpy as np

    size, count = 1024**3, 6

    def locked() -> None:
        with ThreadPoolExecutor(count) as pool:
            list(pool.map(lambda _: torch.empty(size - 4096, dtype=torch.uint8, pin_memory=True), range(count)))

    def registered() -> None:
        def take(_: int) -> Tensor:
            memory = np.empty(size, np.uint8)
            memory[::4096] = 0
            found = torch.from_numpy(memory)
            torch.cuda.cudart().cudaHostRegister(found.data_ptr(), size, 0)
            return found

        with ThreadPoolExecutor(count) as pool:
            held = list(pool.map(take, range(count)))
        seconds.append(time.perf_counter() - begun)
        for one in held:
            torch.cuda.cudart().cudaHostUnregister(one.data_ptr())

    seconds: list[float] = []
    first = bench.timed(locked)
    begun = time.perf_counter()
    registered()
    bench.add(
        part="page-locking",
        what=f"{count} GiB on {count} threads",
        allocated_s=first,
        touched_and_registered_s=seconds[0],
    )


def generation(bench: Bench) -> None:
    """Tokens one by one from a Llama-like model of transformers in host memory."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from accelerate import cpu_offload as peer_offload

    layers = 2 if bench.tiny else 4 if bench.quick else 16
    width = 32 if bench.tiny else 4096
    config = LlamaConfig(
        vocab_size=128 if bench.tiny else 32000,
        hidden_size=width,
        intermediate_size=4 * width if bench.tiny else 11008,
        num_hidden_layers=layers,
        num_attention_heads=4 if bench.tiny else 32,
        max_position_embeddings=256,
    )
    torch.manual_seed(0)
    with bench.device:
        source = LlamaForCausalLM(config).to(torch.bfloat16).eval()

    def empty() -> nn.Module:
        with torch.device("cpu"), init_empty_weights():
            return LlamaForCausalLM(config).to(torch.bfloat16)

    ours, peer = on_host(bench, source, empty), on_host(bench, source, empty)
    ids = torch.randint(3, 100, (1, 8), device=bench.device)
    tokens = 4 if bench.tiny or bench.quick else 6
    options = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False, "pad_token_id": 0}
    ask = lambda model: model.generate(ids, attention_mask=torch.ones_like(ids), **options)  # noqa: E731
    wanted, logits = ask(source), source(ids).logits
    twice = bool(torch.equal(source(ids).logits, logits)) and bool(torch.equal(ask(source), wanted))
    kept = outputs_of(source, ids)
    weights = num_bytes(source)
    del source
    free(bench)
    cpu_offload(ours, bench.device)
    peer_offload(peer, bench.device)
    told, theirs = ours(ids).logits, peer(ids).logits
    equal = bool(torch.equal(told, logits)) and bool(torch.equal(ask(ours), wanted))
    bench.add(
        part="generation",
        what="compared with the resident model",
        logits_equal=bool(torch.equal(told, logits)),
        tokens_equal=bool(torch.equal(ask(ours), wanted)),
        resident_twice_equal=twice,
        Accelerate_logits_equal=bool(torch.equal(theirs.to(logits.device), logits)),
        Accelerate_tokens_equal=bool(torch.equal(ask(peer).to(wanted.device), wanted)),
        largest_difference=float((told.float() - logits.float()).abs().max()),
        first_difference=first_difference(kept, outputs_of(ours, ids)),
    )
    times = bench.turns({"hasten": lambda: ask(ours), "Accelerate": lambda: ask(peer)}, rounds=2)
    limit = weights / bench.bandwidth
    bench.add(
        part="generation",
        what=f"Llama-like, {weights / GB:.1f} GB, {tokens} tokens",
        hasten_s_a_token=times["hasten"] / tokens,
        Accelerate_s_a_token=times["Accelerate"] / tokens,
        of_limit=round(times["hasten"] / tokens / limit, 3),
        times_faster=round(times["Accelerate"] / times["hasten"], 2),
        bit_equal=equal,
    )
    detach(ours)
    cpu_offload(ours, bench.device, resident=weights // 2)
    half = bench.turns({"hasten": lambda: ask(ours)}, rounds=2)["hasten"]
    bench.add(
        part="generation",
        what="half of the weights resident",
        hasten_s_a_token=half / tokens,
        of_limit=round(half / tokens / limit, 3),
    )
    detach(ours)


def write(bench: Bench, out: Path, seconds: float) -> None:
    known = {**versions(bench.device.type), "seconds": str(round(seconds))}
    out.parent.mkdir(parents=True, exist_ok=True)
    out.with_suffix(".json").write_text(json.dumps({"versions": known, "rows": bench.rows}, indent=1) + "\n")
    lines = ["# Offloaded models", "", ", ".join(f"{key} {value}" for key, value in known.items()), ""]
    for row in bench.rows:
        rest = ", ".join(f"{key} {_cell(value)}" for key, value in row.items() if key not in ("part", "what"))
        lines.append(f"- **{row['part']}** ({row['what']}): {rest}")
    out.with_suffix(".md").write_text("\n".join(lines) + "\n")


def _cell(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def main() -> None:
    warnings.filterwarnings("ignore")
    logging.basicConfig(level=logging.WARNING, format="  %(message)s")
    logging.getLogger("hasten").setLevel(logging.INFO)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--parts", nargs="*", default=["cpu", "generation", "disk", "growth"])
    chosen = parser.parse_args()
    device = torch.device(chosen.device, 0) if chosen.device != "cpu" else torch.device("cpu")
    bench = Bench(device, chosen.quick)
    out = chosen.out or RESULTS / f"offload_{device.type}"
    started = time.perf_counter()
    folder = Path(tempfile.mkdtemp(prefix="hasten-offload-"))
    parts = {
        "cpu": cpu_forward,
        "generation": generation,
        "disk": lambda b: disk_and_loading(b, folder),
        "growth": growth,
        "pin": pinning,
    }
    try:
        with torch.no_grad():
            measure_bandwidth(bench)
            for name in chosen.parts:
                begun = time.perf_counter()
                parts[name](bench)
                free(bench)
                print(f"  {name}: {time.perf_counter() - begun:.0f} s", flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        write(bench, out, time.perf_counter() - started)


if __name__ == "__main__":
    main()
