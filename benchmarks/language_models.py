"""Llama models of transformers in bf16 and fp8: tokens a second, MFU, peak memory and losses, compiled in every way beside the peers.

    python benchmarks/language_models.py --part deep              # 1.1 B parameters: 16 layers of width 2048, about four minutes on an H200
    python benchmarks/language_models.py --part wide              # 1.7 B: 6 layers of width 4096, about three minutes
    python benchmarks/language_models.py --small                  # tiny models on the CPU, without code generation: to see that it runs
    python benchmarks/language_models.py --part wide --limit 180  # leave out contenders that would start after 180 seconds
    hasten tune benchmarks/language_models.py --budget 5m --only compile --updates 12 --warmup 3 -- --train --part wide   # the same model, tuned

Everybody trains the same model from the same weights on the same batches of 8 x 2048 tokens, with a fused AdamW. The sequences follow
a rule with noise, so that a precision that does not learn shows. Contenders take turns, as many at a time as fit the GPU, always
beside `torch.compile` of the whole model by hand. The products of matrices of a step are also measured alone, repeated until the GPU has the speed
that its power allows: no way to train in bf16 can be faster. Two peaks of memory are measured, without what other contenders hold: of
all steps from the first, and of those after the warm-up. Results are written after each group.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
from loading import installed_versions
from recording import RESULTS, record_run
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

Step = Callable[[Tensor], Tensor]
PEAK_TFLOPS = 989.0
"""Dense bf16 peak of an H100 or H200; MFU of fp8 is relative to it too."""
NOISE = 0.1
COMPARED = 12
"""Steps before anything is timed, the first of which compile; their losses are compared with the eager loop's."""


@dataclass(frozen=True)
class Size:
    """A model and its batches."""

    name: str
    width: int
    inner: int
    layers: int
    heads: int
    groups: int
    vocabulary: int = 32000
    rows: int = 8
    length: int = 2048
    rounds: int = 6
    turn: int = 4
    backend: str = "inductor"

    @property
    def tokens(self) -> int:
        return self.rows * self.length


SIZES = {
    "deep": Size("16 layers of width 2048", 2048, 8192, 16, 32, 8),
    "wide": Size("6 layers of width 4096", 4096, 14336, 6, 32, 32),
}
SMALL = {
    "deep": Size(
        "3 layers of width 64", 64, 128, 3, 4, 2, 128, 2, 32, 2, 2, "aot_eager"
    ),
    "wide": Size(
        "2 layers of width 128", 128, 256, 2, 4, 4, 128, 2, 32, 2, 2, "aot_eager"
    ),
}


def model_of(size: Size, device: torch.device) -> Any:
    """The model, with the same weights in every run on the same device."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=size.vocabulary,
        hidden_size=size.width,
        intermediate_size=size.inner,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.groups,
        max_position_embeddings=size.length,
        use_cache=False,
        attn_implementation="sdpa",
    )
    with torch.device(device):
        return LlamaForCausalLM(config).train()


def data_of(size: Size, batches: int = 8) -> Tensor:
    """Sequences in which a token decides the next one, but for one in ten, which is drawn at random."""
    source = torch.Generator().manual_seed(1)
    used, rows = min(size.vocabulary, 1000), size.rows * batches
    follows = torch.randperm(used, generator=source)
    drawn = torch.randint(used, (rows, size.length), generator=source)
    random = torch.rand(rows, size.length, generator=source) < NOISE
    for position in range(1, size.length):
        drawn[:, position] = torch.where(
            random[:, position], drawn[:, position], follows[drawn[:, position - 1]]
        )
    return drawn


def optimizer_of(model: Any, device: torch.device) -> torch.optim.Optimizer:
    """AdamW with a rate at which both models learn steadily; with 3e-4 the loss of the wide one rises from 5 to 18 in the eleventh step."""
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device.type == "cuda")


def flops_of_token(size: Size, model: Any) -> float:
    """Six operations for every weight that multiplies, and attention in full."""
    weights = sum(p.numel() for p in model.parameters()) - size.vocabulary * size.width
    return 6 * weights + 12 * size.layers * size.width * size.length


# -- the contenders: each gives the step of a loop --------------------------------------------------------------------
def by_hand(size: Size, device: torch.device, compiled: bool = False) -> Step:
    model = model_of(size, device)
    optimizer = optimizer_of(model, device)
    if compiled:
        model.compile(backend=size.backend)

    def step(tokens: Tensor) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16):
            loss: Tensor = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def compiled_by_hand(size: Size, device: torch.device) -> Step:
    return by_hand(size, device, compiled=True)


def with_accelerator(
    accelerator: Any,
    size: Size,
    device: torch.device,
    change: Callable[[Any], Any] = lambda module: module,
) -> Step:
    """The loop for an object with Accelerate's method names."""
    net = change(model_of(size, device))
    model, optimizer = accelerator.prepare(net, optimizer_of(net, device))

    def step(tokens: Tensor) -> Tensor:
        loss: Tensor = model(input_ids=tokens, labels=tokens).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def accelerate(size: Size, device: torch.device) -> Step:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    if "hasten" in getattr(sys.modules["accelerate"], "__version__", ""):
        raise ImportError("the drop-in stands in for Accelerate here")
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(
        mixed_precision="bf16", dynamo_backend="inductor", cpu=device.type == "cpu"
    )
    return with_accelerator(accelerator, size, device)


def hasten(size: Size, device: torch.device, **settings: Any) -> Step:
    from hasten import Accelerator

    change = settings.pop("change", lambda module: module)
    accelerator = Accelerator(
        **{"mixed_precision": "bf16", "cpu": device.type == "cpu", **settings}
    )
    return with_accelerator(accelerator, size, device, change)


def block_settings(size: Size, **plugin_settings: Any) -> Any:
    """Settings that compile by block."""
    from hasten import TorchDynamoPlugin

    return {
        "dynamo_plugin": TorchDynamoPlugin(
            backend=size.backend, use_regional_compilation=True, **plugin_settings
        )
    }


def fp8_settings() -> Any:
    from hasten import AORecipeKwargs, FP8Config

    recipe = AORecipeKwargs(recipe_name="tensorwise")
    return {
        "mixed_precision": "fp8",
        "kwargs_handlers": [FP8Config(backend="ao", ao=recipe)],
    }


def hasten_auto(size: Size, device: torch.device) -> Step:
    return hasten(size, device, performance="auto")


def by_block(size: Size, device: torch.device) -> Step:
    return hasten(size, device, **block_settings(size))


def by_block_with_loss(size: Size, device: torch.device) -> Step:
    return hasten(size, device, **block_settings(size, compile_loss=True))


def fp8_by_block(size: Size, device: torch.device) -> Step:
    return hasten(
        size, device, **fp8_settings(), **block_settings(size, compile_loss=True)
    )


def fp8_auto(size: Size, device: torch.device) -> Step:
    return hasten(size, device, performance="auto", **fp8_settings())


def hasten_chunked(size: Size, device: torch.device) -> Step:
    from hasten import use_chunked_loss

    def change(model: Any) -> Any:
        use_chunked_loss(model)
        return model

    return hasten(
        size, device, change=change, **block_settings(size, compile_loss=True)
    )


REFERENCE = "bare torch, torch.compile"
EAGER = "bare torch, eager"
CONTENDERS: dict[str, Callable[[Size, torch.device], Step]] = {
    EAGER: by_hand,
    REFERENCE: compiled_by_hand,
    'hasten, performance="auto"': hasten_auto,
    "hasten, fp8, blocks and loss compiled": fp8_by_block,
    'Accelerate, dynamo_backend="inductor"': accelerate,
    "hasten, blocks and loss compiled": by_block_with_loss,
    'hasten, fp8, performance="auto"': fp8_auto,
    "hasten, blocks and loss compiled, loss in chunks": hasten_chunked,
    "hasten, blocks compiled": by_block,
}


# -- the limit ----------------------------------------------------------------------------------------------------------
def time_products(size: Size, device: torch.device, seconds: float = 0.3) -> float:
    """Seconds that the products of matrices of one step take alone, each repeated long enough to reach the speed that the GPU sustains."""
    total = 0.0
    shapes = Counter(
        tuple(module.weight.shape)
        for module in model_of(size, torch.device("meta")).modules()
        if isinstance(module, torch.nn.Linear)
    )
    draw = partial(torch.randn, device=device, dtype=torch.bfloat16)
    for (outputs, inputs), count in shapes.items():
        x, weight, gradient = (
            draw(size.tokens, inputs),
            draw(outputs, inputs) * 0.02,
            draw(size.tokens, outputs) * 0.01,
        )
        for left, right in ((x, weight.t()), (gradient, weight), (gradient.t(), x)):
            total += count * time_product(left, right, seconds)
    return total


def time_product(left: Tensor, right: Tensor, seconds: float) -> float:
    """Seconds of one product among many."""
    wait = torch.cuda.synchronize if left.is_cuda else (lambda: None)
    done, spent, start_time = 0, 0.0, time.perf_counter()
    while spent < seconds:
        for _ in range(5):
            left @ right
        wait()
        done, spent = done + 5, time.perf_counter() - start_time
    return spent / done


# -- measuring --------------------------------------------------------------------------------------------------------
@dataclass
class Row:
    """What is known of a contender."""

    losses: list[float] = field(default_factory=list)
    ready_s: float = 0.0
    peak: float = 0.0
    steady_peak: float = 0.0
    seconds: list[float] = field(default_factory=list)
    left_out: str = ""


def allocated_gib(device: torch.device, peak: bool = False) -> float:
    if device.type != "cuda":
        return 0.0
    return (
        torch.cuda.max_memory_allocated() if peak else torch.cuda.memory_allocated()
    ) / 2**30


def reset_memory(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def first_steps(
    make: Callable[..., Step], size: Size, device: torch.device, batches: list[Tensor]
) -> tuple[Step, Row]:
    """Build a contender and run it until everything is compiled."""
    row, loss_tensors = Row(), []
    reset_memory(device)
    initial_gib, start_time = allocated_gib(device), time.monotonic()
    step = make(size, device)
    for number in range(COMPARED):
        loss_tensors.append(step(batches[number % len(batches)]))
    row.losses = [float(loss) for loss in loss_tensors]
    row.ready_s = time.monotonic() - start_time
    row.peak = allocated_gib(device, peak=True) - initial_gib
    reset_memory(device)
    for number in range(3):
        step(batches[number])
    row.steady_peak = allocated_gib(device, peak=True) - initial_gib
    return step, row


def take_turns(
    steps: dict[str, Step],
    rows: dict[str, Row],
    size: Size,
    batches: list[Tensor],
    rounds: int,
) -> None:
    """Seconds a step in each round; contenders alternate."""
    wait = torch.cuda.synchronize if batches[0].is_cuda else (lambda: None)
    for _ in range(rounds):
        for name, step in steps.items():
            step(batches[0])  # memory of others was used last
            wait()
            start_time = time.perf_counter()
            for number in range(size.turn):
                step(batches[number % len(batches)])
            wait()
            rows[name].seconds.append((time.perf_counter() - start_time) / size.turn)


def group_contenders(
    names: list[str], size: Size, device: torch.device
) -> Iterator[list[str]]:
    """Contenders that fit the GPU together, each group with the reference: 12 bytes a parameter, and a third of the GPU for a step."""
    compared_names = [name for name in names if name != REFERENCE]
    if device.type == "cuda":
        parameters = sum(
            p.numel() for p in model_of(size, torch.device("meta")).parameters()
        )
        room = torch.cuda.get_device_properties(device).total_memory * 0.62
        each = max(1, int(room / (12 * parameters)) - 1)
    else:
        each = len(compared_names) or 1
    for start in range(0, max(1, len(compared_names)), each):
        yield [REFERENCE, *compared_names[start : start + each]]


def measure_model(kind: str, args: argparse.Namespace, device: torch.device) -> None:
    """Measure one model's contenders and write the table."""
    size = (SMALL if args.small else SIZES)[kind]
    names = [
        name for name in CONTENDERS if any(word in name for word in args.only or [""])
    ]
    if args.small:
        # it always generates code
        names = [name for name in names if "performance" not in name]
    batches = [rows.to(device) for rows in data_of(size).split(size.rows)]
    rows: dict[str, Row] = {}
    start_time = time.monotonic()
    products_s = time_products(size, device)
    reset_memory(device)
    for group in group_contenders(names, size, device):
        if time.monotonic() - start_time > args.limit:
            rows |= {
                name: Row(left_out="no time left") for name in group if name not in rows
            }
            continue
        steps: dict[str, Step] = {}
        for name in group:
            if time.monotonic() - start_time > args.limit and name != REFERENCE:
                rows.setdefault(name, Row(left_out="no time left"))
                continue
            try:
                steps[name], row = first_steps(CONTENDERS[name], size, device, batches)
                contender_row = rows.setdefault(name, row)
                print(
                    f"  {name}: ready after {row.ready_s:.0f} s, {contender_row.peak:.1f} GiB, steady {contender_row.steady_peak:.1f} GiB",
                    flush=True,
                )
            except Exception as error:  # of any kind: the page names it
                first_line = (str(error).strip().splitlines() or ["no message"])[0]
                rows[name] = Row(left_out=f"{type(error).__name__}: {first_line[:200]}")
                print(f"  {name} left out: {rows[name].left_out}", flush=True)
                traceback.print_exc(limit=-4)
        take_turns(steps, rows, size, batches, args.rounds or size.rounds)
        steps.clear()
        torch._dynamo.reset()
        reset_memory(device)
        write_results(kind, size, rows, args, device, products_s)


def write_results(
    kind: str,
    size: Size,
    rows: dict[str, Row],
    args: argparse.Namespace,
    device: torch.device,
    products_s: float,
) -> None:
    flops = flops_of_token(size, model_of(size, torch.device("meta")))
    platform_versions = installed_versions(device.type)
    for name in ("transformers", "torchao"):
        try:
            platform_versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    measurements: dict[str, Any] = {
        "model": size.name,
        "tokens": size.tokens,
        "rows": {},
    }
    reference = rows[REFERENCE].seconds
    measurements["products"] = {
        "seconds": products_s,
        "tokens a second": size.tokens / products_s,
        "times compiled by hand": statistics.median(reference) / products_s,
        "mfu": size.tokens / products_s * flops / (PEAK_TFLOPS * 1e12),
    }
    for name, row in rows.items():
        if row.left_out or not row.seconds:
            continue
        seconds = statistics.median(row.seconds)
        speed = size.tokens / seconds
        eager = rows[EAGER].losses if EAGER in rows else []
        loss_difference = max(
            (abs(a - b) / a for a, b in zip(eager, row.losses, strict=False)),
            default=float("nan"),
        )
        measurements["rows"][name] = {
            "tokens a second": speed,
            "times compiled by hand": statistics.median(reference) / seconds,
            "mfu": speed * flops / (PEAK_TFLOPS * 1e12),
            "peak GiB": row.peak,
            "steady peak GiB": row.steady_peak,
            "ready after s": row.ready_s,
            "losses apart": loss_difference,
            "losses": [round(loss, 4) for loss in row.losses[:COMPARED]],
        }
    measurements["left out"] = {
        name: row.left_out for name, row in rows.items() if row.left_out
    }
    page = format_page(measurements)
    record_run(
        "language_models",
        f"{kind}{', small' if args.small else ''}",
        measurements,
        page,
        platform_versions,
        args.out,
    )
    print(page, flush=True)


def format_page(measurements: dict[str, Any]) -> str:
    lines = [
        f"# Llama, {measurements['model']}",
        "",
        f"{measurements['tokens']} tokens a step, bf16 autocast, fused AdamW. Median of interleaved turns. MFU: relative to {PEAK_TFLOPS:.0f} "
        f"TFLOP/s; peaks: all steps, and steps after the warm-up; losses: largest relative difference from the eager loop's in {COMPARED} steps.",
        f"The products of matrices alone take {measurements['products']['seconds'] * 1e3:.1f} ms, {measurements['products']['times compiled by hand']:.2f} × compiled by hand.",
        "",
        "| | ktok/s | × compiled by hand | MFU | peak GiB | steady GiB | ready after | losses apart |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, row in measurements["rows"].items():
        lines.append(
            f"| {name} | {row['tokens a second'] / 1e3:.1f} | {row['times compiled by hand']:.2f} | {row['mfu']:.1%} | {row['peak GiB']:.1f} | "
            f"{row['steady peak GiB']:.1f} | {row['ready after s']:.0f} s | {row['losses apart']:.1e} |"
        )
    lines += [
        "",
        *(
            f"Left out: {name} ({why})."
            for name, why in measurements["left out"].items()
        ),
    ]
    return "\n".join(lines) + "\n"


def train_script(args: argparse.Namespace) -> None:
    """Train one of the models by a plain script, for `hasten tune`."""
    from hasten import Accelerator

    size = (SMALL if args.small else SIZES)[args.part]
    accelerator = Accelerator(mixed_precision="bf16", cpu=args.small)
    model = model_of(size, accelerator.device)
    loader: Any = DataLoader(TensorDataset(data_of(size)), batch_size=size.rows)
    model, optimizer, loader = accelerator.prepare(
        model, optimizer_of(model, accelerator.device), loader
    )
    for _ in range(10_000):
        for (tokens,) in loader:
            accelerator.backward(model(input_ids=tokens, labels=tokens).loss)
            optimizer.step()
            optimizer.zero_grad()


def main() -> None:
    """Measure the models that were asked for, or train one."""
    warnings.filterwarnings("ignore")
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", choices=["deep", "wide", "all"], default="all")
    parser.add_argument("--small", action="store_true", help="tiny models on the CPU")
    parser.add_argument(
        "--limit",
        type=float,
        default=1e9,
        help="seconds after which no contender of a model is started",
    )
    parser.add_argument(
        "--only", nargs="*", default=[], help="words in the names of contenders to run"
    )
    parser.add_argument("--rounds", type=int, help="turns of each contender")
    parser.add_argument(
        "--train", action="store_true", help="train, as a script for `hasten tune`"
    )
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    # contenders share code; none may give up because of what others compiled
    torch._dynamo.config.recompile_limit = 64
    torch._dynamo.config.accumulated_recompile_limit = 1024
    if args.train:
        train_script(args)
        return
    device = torch.device("cpu" if args.small else "cuda")
    for kind in SIZES if args.part == "all" else (args.part,):
        measure_model(kind, args, device)


if __name__ == "__main__":
    main()
