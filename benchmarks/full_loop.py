"""The loop people write, whole: loader, device copy, forward, backward, clipping, step, scheduler.

    python benchmarks/full_loop.py                  # on the CPU
    python benchmarks/full_loop.py --device cuda    # on a GPU, about seven minutes

Side by side with bare torch, Hugging Face Accelerate and Lightning Fabric, each with its best settings. Contenders take turns
in one process, 96 steps at a time, many rounds over; a turn divides evenly by the accumulation window, and is long enough that its
first steps, in which the processor's caches hold the code of others, weigh little. Each loop is
built three times, because where one build's memory, threads and workers lie shifts its times by some percent. A ratio is the
median of a contender over the median of bare torch; beside it stand the quartiles of the rounds' own ratios. Bare torch is
written twice on a GPU, with and without `pin_memory`, and the faster one is the reference. Packages that are not
installed, or refuse a case, are left out and named. The same run measures the loader alone, single calls, and the
input-bound loop. Results go to benchmarks/results as JSON and Markdown, written again after every case.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import input_bound
import torch
from loading import installed_versions
from measuring import record_dtypes
from recording import RESULTS, record_run
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

STEPS = 480  # an epoch
BUILDS = 3  # times a loop is built afresh
# steps a contender makes before the next one takes over; divides by the window
TURN = 96
ROWS, WIDTH = 32, 32  # 4 KB a batch
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
FABRIC = {"no": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed"}
Loop = Iterator[None]  # endless: one step each time it is advanced


@dataclass(frozen=True)
class Case:
    """One column of the table, at one number of workers."""

    name: str
    precision: str = "no"
    every: int = 1
    clip: bool = False
    workers: int = 0


COLUMNS = (
    Case("fp32"),
    Case("accumulation 4", every=4),
    Case("bf16", precision="bf16"),
    Case("fp16", precision="fp16"),
    Case("fp32, clipping", clip=True),
)


class Rows(Dataset[Any]):
    """Rows in memory, a batch read by one indexing: the loader costs as little as it can."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(STEPS * ROWS, WIDTH, generator=generator)
        self.y = torch.randint(10, (STEPS * ROWS,), generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], self.y[index]

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        row_indices = torch.tensor(indices)
        return self.x[row_indices], self.y[row_indices]


def as_is(batch: Any) -> Any:
    return batch


def loader_of(data: Rows, workers: int, pinned: bool = False) -> DataLoader[Any]:
    return DataLoader(
        data,
        batch_size=ROWS,
        shuffle=True,
        collate_fn=as_is,
        num_workers=workers,
        persistent_workers=workers > 0,
        pin_memory=pinned,
    )


def parts_of(device: torch.device) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(WIDTH, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)
    ).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return (
        model,
        optimizer,
        torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=1_000_000),
    )


# -- the contenders ---------------------------------------------------------------------------------------------------
def run_bare_loop(
    case: Case, device: torch.device, data: Rows, pinned: bool = False
) -> Loop:
    """The loop a careful person writes by hand."""
    model, optimizer, scheduler = parts_of(device)
    loader = loader_of(data, case.workers, pinned)
    moving = device.type != "cpu"
    dtype = DTYPES.get(case.precision)
    scaler = torch.amp.GradScaler(device.type) if case.precision == "fp16" else None

    def forward(x: Tensor, y: Tensor) -> Tensor:
        if dtype is None:
            return F.cross_entropy(model(x), y)
        with torch.autocast(device.type, dtype):
            return F.cross_entropy(model(x), y)

    def apply_update() -> None:
        if case.clip:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        scheduler.step()
        optimizer.zero_grad()

    while True:
        for number, (x, y) in enumerate(loader, 1):
            if moving:
                x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
            loss = forward(x, y)
            if case.every > 1:
                loss = loss / case.every
            (loss if scaler is None else scaler.scale(loss)).backward()
            if number % case.every == 0:
                apply_update()
            yield


def bare_pinned(case: Case, device: torch.device, data: Rows) -> Loop:
    if device.type == "cpu":
        raise ImportError("pinned memory is for GPUs")
    return run_bare_loop(case, device, data, pinned=True)


def run_with_accelerator(
    accelerator: Any, case: Case, device: torch.device, data: Rows
) -> Loop:
    """The loop for an object with Accelerate's method names."""
    training_objects, loader = parts_of(device), loader_of(data, case.workers)
    model, optimizer, scheduler, loader = accelerator.prepare(*training_objects, loader)

    while case.every == 1:
        for x, y in loader:
            accelerator.backward(F.cross_entropy(model(x), y))
            if case.clip:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            yield
    while True:
        for x, y in loader:
            with accelerator.accumulate(model):
                accelerator.backward(F.cross_entropy(model(x), y))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            yield


def hasten(case: Case, device: torch.device, data: Rows) -> Loop:
    from hasten import Accelerator

    accelerator = Accelerator(
        mixed_precision=case.precision,
        gradient_accumulation_steps=case.every,
        cpu=device.type == "cpu",
    )
    return run_with_accelerator(accelerator, case, device, data)


def accelerate(case: Case, device: torch.device, data: Rows) -> Loop:
    accelerator = accelerate_object(
        device,
        mixed_precision=case.precision,
        gradient_accumulation_steps=case.every,
        step_scheduler_with_optimizer=True,
    )
    return run_with_accelerator(accelerator, case, device, data)


def accelerate_object(device: torch.device, **settings: Any) -> Any:
    from accelerate import Accelerator, DataLoaderConfiguration
    from accelerate.state import AcceleratorState

    if "hasten" in (getattr(sys.modules["accelerate"], "__version__", "")):
        raise ImportError(
            "the drop-in stands in for Accelerate here; run in an environment with the original"
        )
    # its settings are one per process
    AcceleratorState._reset_state(reset_partial_state=True)
    config = DataLoaderConfiguration(non_blocking=device.type != "cpu")
    return Accelerator(cpu=device.type == "cpu", dataloader_config=config, **settings)


def fabric(case: Case, device: torch.device, data: Rows) -> Loop:
    from lightning.fabric import Fabric

    runner = Fabric(
        accelerator=device.type, devices=1, precision=FABRIC[case.precision]
    )  # type: ignore[arg-type]
    runner.launch()
    net, optimizer, scheduler = parts_of(device)
    model, optimizer = runner.setup(net, optimizer)
    loader: Any = runner.setup_dataloaders(loader_of(data, case.workers))

    while True:
        for number, (x, y) in enumerate(loader, 1):
            last = number % case.every == 0
            with (
                runner.no_backward_sync(model, enabled=not last)
                if case.every > 1
                else nullcontext()
            ):
                loss = F.cross_entropy(model(x), y)
                runner.backward(loss if case.every == 1 else loss / case.every)
            if last:
                if case.clip:
                    runner.clip_gradients(model, optimizer, max_norm=1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            yield


CONTENDERS: dict[str, Callable[[Case, torch.device, Rows], Loop]] = {
    "bare torch": run_bare_loop,
    "bare torch, pinned": bare_pinned,
    "hasten": hasten,
    "Fabric": fabric,
    "Accelerate": accelerate,
}


# -- timing -----------------------------------------------------------------------------------------------------------
def take_turns(
    passes: dict[str, Loop], rounds: int, device: torch.device
) -> dict[str, list[tuple[float, float]]]:
    """Seconds a step in each round, by the clock and of this process's processor time; contenders alternate."""
    sync = torch.cuda.synchronize if device.type == "cuda" else (lambda: None)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in passes}
    names = list(passes)
    gc.collect()
    gc.disable()
    try:
        for turn in range(rounds + 2):
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                sync()
                start_time, spent = time.perf_counter(), time.process_time()
                advance_loop(passes[name])
                sync()
                took = (
                    (time.perf_counter() - start_time) / TURN,
                    (time.process_time() - spent) / TURN,
                )
                if turn >= 2:
                    times[name].append(took)
    finally:
        gc.enable()
    return times


def advance_loop(loop: Loop) -> None:
    for _ in range(TURN):
        next(loop)


def summarize_times(
    times: dict[str, list[tuple[float, float]]],
) -> dict[str, dict[str, Any]]:
    """Median microseconds, ratio to the faster bare loop by the clock and by processor time, and the ratio's quartiles."""
    summaries: dict[str, dict[str, Any]] = {}
    medians = {
        name: [statistics.median(column) for column in zip(*rows, strict=True)]
        for name, rows in times.items()
    }
    reference = min(
        (name for name in times if name.startswith("bare")),
        key=lambda name: medians[name][0],
    )
    for name, rows in times.items():
        ratios = [
            row[0] / reference_row[0]
            for row, reference_row in zip(rows, times[reference], strict=True)
        ]
        summaries[name] = {
            "microseconds": medians[name][0] * 1e6,
            "ratio": medians[name][0] / medians[reference][0],
            "ratio_quartiles": [round(q, 3) for q in statistics.quantiles(ratios, n=4)],
            "processor_microseconds": medians[name][1] * 1e6,
            "processor_ratio": medians[name][1] / medians[reference][1],
            "reference": name == reference,
        }
    return summaries


def build_contenders(
    case: Case, device: torch.device, data: Rows, left_out: set[str]
) -> dict[str, Loop]:
    passes = {}
    for name, make in CONTENDERS.items():
        try:
            passes[name] = make(case, device, data)
            with record_dtypes() as computed_dtypes:
                advance_loop(passes[name])
            if case.precision != "no" and DTYPES[case.precision] not in computed_dtypes:
                raise RuntimeError(
                    f"asked for {case.precision}, it computes in {', '.join(map(str, computed_dtypes))}"
                )
        except Exception as error:
            passes.pop(name, None)
            if name in ("bare torch", "hasten"):
                raise
            installed = not isinstance(error, ModuleNotFoundError)
            if installed and (name != "bare torch, pinned" or device.type == "cuda"):
                left_out.add(
                    f"{name} ({case.name}): {type(error).__name__}: {str(error).splitlines()[0][:150]}"
                )
    return passes


def measure_loops(
    device: torch.device,
    workers: list[int],
    rounds: int,
    names: list[str],
    left_out: set[str],
) -> Iterator[dict[str, Any]]:
    data = Rows()
    for count in workers:
        for column in COLUMNS:
            case = Case(column.name, column.precision, column.every, column.clip, count)
            if (names and case.name not in names) or (count and case.clip):
                continue
            times: dict[str, list[tuple[float, float]]] = {}
            for _ in range(BUILDS):
                for name, round_times in take_turns(
                    build_contenders(case, device, data, left_out), rounds, device
                ).items():
                    times.setdefault(name, []).extend(round_times)
            rows = summarize_times(times)
            contender_texts = [
                f"{n} {r['microseconds']:.0f} µs (x {r['ratio']:.3f})"
                for n, r in rows.items()
            ]
            print(
                f"{case.name}, {count} workers: {', '.join(contender_texts)}",
                flush=True,
            )
            yield {
                "case": case.name,
                "workers": count,
                "rounds": rounds * BUILDS,
                "contenders": rows,
            }


# -- the loader alone ---------------------------------------------------------------------------------------------------
def measure_loaders(
    device: torch.device, workers: list[int], rounds: int
) -> Iterator[dict[str, Any]]:
    """Microseconds a batch, with nothing done to it but the copy to the device."""
    data = Rows()
    for count in workers:
        turns = rounds if count else 4 * rounds
        rows = summarize_times(
            take_turns(prepare_readers(device, data, count), turns, device)
        )
        contender_texts = [
            f"{n} {r['microseconds']:.1f} µs (x {r['ratio']:.3f})"
            for n, r in rows.items()
        ]
        print(
            f"loader alone, {count} workers: {', '.join(contender_texts)}", flush=True
        )
        yield {"workers": count, "rounds": turns, "contenders": rows}


def prepare_readers(device: torch.device, data: Rows, workers: int) -> dict[str, Loop]:
    def by_hand(pinned: bool) -> Iterable[Any]:
        loader = loader_of(data, workers, pinned)
        if device.type == "cpu":
            return loader

        class Moving:
            def __iter__(self) -> Iterator[Any]:
                for x, y in loader:
                    yield (
                        x.to(device, non_blocking=True),
                        y.to(device, non_blocking=True),
                    )

        return Moving()

    def read_with_hasten() -> Iterable[Any]:
        from hasten import Accelerator

        prepared_loader: Iterable[Any] = Accelerator(cpu=device.type == "cpu").prepare(
            loader_of(data, workers)
        )
        return prepared_loader

    def read_with_fabric() -> Iterable[Any]:
        from lightning.fabric import Fabric

        prepared_loader: Iterable[Any] = Fabric(
            accelerator=device.type, devices=1
        ).setup_dataloaders(loader_of(data, workers))
        return prepared_loader

    makers: dict[str, Callable[[], Iterable[Any]]] = {
        "bare torch": lambda: by_hand(False)
    }
    if device.type == "cuda":
        makers["bare torch, pinned"] = lambda: by_hand(True)
    makers |= {"hasten": read_with_hasten, "Fabric": read_with_fabric}
    makers["Accelerate"] = lambda: accelerate_object(device).prepare(
        loader_of(data, workers)
    )
    passes = {}
    for name, make in makers.items():
        try:
            passes[name] = read_forever(make())
        except ImportError:
            continue
    return passes


def read_forever(loader: Iterable[Any]) -> Loop:
    while True:
        for _ in loader:
            yield


# -- single calls ---------------------------------------------------------------------------------------------------------
def measure_calls(device: torch.device, rounds: int) -> list[dict[str, Any]]:
    """Microseconds of one call, hasten's beside torch's own."""
    from hasten import Accelerator

    folder = tempfile.TemporaryDirectory()
    plain = Accelerator(
        cpu=device.type == "cpu", log_with="jsonl", project_dir=folder.name
    )
    plain.init_trackers("calls")
    model, optimizer, scheduler = plain.prepare(*parts_of(device))
    windows = Accelerator(cpu=device.type == "cpu", gradient_accumulation_steps=4)
    windowed_model = windows.prepare(parts_of(device)[0])
    bare_model, bare_optimizer, bare_scheduler = parts_of(device)
    x, y = (
        torch.randn(ROWS, WIDTH, device=device),
        torch.randint(10, (ROWS,), device=device),
    )
    for trained_model in (model, bare_model):
        F.cross_entropy(trained_model(x), y).backward()
    optimizer.step()
    bare_optimizer.step()
    weight = torch.ones(1, device=device, requires_grad=True)
    losses = [weight * 1 for _ in range(2)]

    def accumulate() -> None:
        with windows.accumulate(windowed_model):
            pass

    def step_and_schedule() -> None:
        optimizer.step()
        scheduler.step()

    def bare_step_and_schedule() -> None:
        bare_optimizer.step()
        bare_scheduler.step()

    pairs: dict[str, tuple[Callable[[], Any], Callable[[], Any] | None]] = {
        "accumulate (enter and leave)": (accumulate, None),
        "backward of a one-element loss": (
            lambda: plain.backward(losses[0], retain_graph=True),
            lambda: losses[1].backward(retain_graph=True),
        ),
        "clip_grad_norm_": (
            lambda: plain.clip_grad_norm_(model.parameters(), 1.0),
            lambda: nn.utils.clip_grad_norm_(bare_model.parameters(), 1.0),
        ),
        "optimizer.step": (optimizer.step, bare_optimizer.step),
        "optimizer.step and scheduler.step": (
            step_and_schedule,
            bare_step_and_schedule,
        ),
        "optimizer.zero_grad, nothing to clear": (
            optimizer.zero_grad,
            bare_optimizer.zero_grad,
        ),
        "log of one number to a JSON-lines file": (
            lambda: plain.log({"loss": 0.5}, step=1),
            None,
        ),
    }
    call_rows = []
    for name, (hasten_call, torch_call) in pairs.items():
        row: dict[str, Any] = {
            "call": name,
            "hasten": time_call(hasten_call, device, rounds),
        }
        if torch_call is not None:
            row["bare torch"] = time_call(torch_call, device, rounds)
        call_rows.append(row)
        print(
            ", ".join(
                f"{k}: {v if isinstance(v, str) else f'{v:.2f} µs'}"
                for k, v in row.items()
            ),
            flush=True,
        )
    plain.end_training()
    folder.cleanup()
    return call_rows


def time_call(
    call: Callable[[], Any], device: torch.device, rounds: int, block: int = 100
) -> float:
    sync = torch.cuda.synchronize if device.type == "cuda" else (lambda: None)
    times = []
    for _ in range(rounds + 2):
        sync()
        start_time = (
            time.perf_counter() if device.type == "cuda" else time.process_time()
        )
        for _ in range(block):
            call()
        spent = (
            time.perf_counter() if device.type == "cuda" else time.process_time()
        ) - start_time
        times.append(spent / block * 1e6)
    return statistics.median(times[2:])


# -- the report -----------------------------------------------------------------------------------------------------------
def format_cell(row: dict[str, Any] | None, digits: int = 0) -> str:
    if row is None:
        return "–"
    low, _, high = row["ratio_quartiles"]
    text = f"{row['microseconds']:.{digits}f} µs, × {row['ratio']:.3f} ({low:.2f}–{high:.2f})"
    if "processor_ratio" in row and row.get("show_processor"):
        text += f", processor × {row['processor_ratio']:.3f}"
    return f"**{text}**" if row["reference"] else text


def format_page(measurements: dict[str, Any], device: str) -> str:
    names = [
        n
        for n in CONTENDERS
        if any(
            n in r["contenders"]
            for r in (*measurements["loops"], *measurements["loaders"])
        )
    ]
    lines = [
        "# The whole loop",
        "",
        ", ".join(f"{k} {v}" for k, v in measurements["versions"].items()),
        "",
    ]
    lines += [
        f"Median microseconds per (micro-)step on the clock over interleaved rounds of {TURN} steps, the "
        "ratio of medians to bare torch, and the quartiles of the rounds' ratios. Bold: the reference, the fastest loop "
        "written by hand. "
        + (
            ""
            if device == "cuda"
            else "Processor ratio: the same for processor time of the process."
        ),
        "",
        "| loop | workers | " + " | ".join(names) + " |",
        "|---|---|" + "---|" * len(names),
    ]
    for row in measurements["loops"]:
        for contender_row in row["contenders"].values():
            contender_row["show_processor"] = device == "cpu"
        cells = " | ".join(format_cell(row["contenders"].get(name)) for name in names)
        lines.append(f"| {row['case']} | {row['workers']} | {cells} |")
    for row in measurements["loaders"]:
        for contender_row in row["contenders"].values():
            contender_row["show_processor"] = device == "cpu"
        cells = " | ".join(
            format_cell(row["contenders"].get(name), 1) for name in names
        )
        lines.append(f"| loader alone | {row['workers']} | {cells} |")
    if measurements["calls"]:
        lines += [
            "",
            "## Single calls (µs)",
            "",
            "| call | hasten | bare torch |",
            "|---|---|---|",
        ]
    for row in measurements["calls"]:
        bare_cell = f"{row['bare torch']:.2f}" if "bare torch" in row else "–"
        lines.append(f"| {row['call']} | {row['hasten']:.2f} | {bare_cell} |")
    if measurements.get("input_bound"):
        lines += ["", "## Input-bound loop", "", "| | |", "|---|---|"]
        for key, value in measurements["input_bound"].items():
            lines.append(f"| {key} | {value:.4g} |")
    if measurements["left_out"]:
        lines += [
            "",
            "Left out:",
            "",
            *[f"- {text}" for text in measurements["left_out"]],
        ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--workers", type=int, nargs="*", default=[0, 2, 4])
    parser.add_argument("--columns", nargs="*", default=[], help="only these columns")
    parser.add_argument(
        "--no-peers", action="store_true", help="only bare torch and hasten"
    )
    parser.add_argument(
        "--rounds", type=int, default=4, help="of each of the three builds"
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=600.0,
        help="start no further case after this long",
    )
    parser.add_argument("--quick", action="store_true", help="no workers")
    parser.add_argument(
        "--published",
        action="store_true",
        help="neither single calls nor the loader alone",
    )
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    device = torch.device(args.device)
    if device.type == "cpu":
        torch.set_num_threads(1)
    if args.no_peers:
        for name in ("Fabric", "Accelerate"):
            del CONTENDERS[name]
    workers, rounds = [0] if args.quick else args.workers, args.rounds
    left_out: set[str] = {
        f"{name}: not installed"
        for name, package in (("Fabric", "lightning"), ("Accelerate", "accelerate"))
        if importlib.util.find_spec(package) is None
    }
    start_time = time.perf_counter()
    measurements: dict[str, Any] = {
        "versions": installed_versions(args.device),
        "loaders": [],
        "loops": [],
        "left_out": [],
    }
    setting = args.device + (
        ", workers" if args.workers and 0 not in args.workers else ""
    )

    def record_measurements() -> None:
        measurements["left_out"] = sorted(left_out)
        measurements["seconds"] = time.perf_counter() - start_time
        record_run(
            "full_loop",
            setting,
            measurements,
            format_page(measurements, args.device),
            measurements["versions"],
            args.out,
        )

    measurements["calls"] = [] if args.published else measure_calls(device, 20)
    for row in measure_loops(device, workers[:1], rounds, args.columns, left_out):
        measurements["loops"].append(row)
        record_measurements()
    measurements["input_bound"] = input_bound.measure_contenders(
        device, rounds=3 if device.type == "cpu" else 6
    )
    for row in measure_loaders(device, [] if args.published else workers, rounds):
        measurements["loaders"].append(row)
        record_measurements()
    for row in measure_loops(device, workers[1:], rounds, args.columns, left_out):
        measurements["loops"].append(row)
        record_measurements()
        if time.perf_counter() - start_time > args.seconds:
            print(f"stopped after {args.seconds} s", flush=True)
            break
    record_measurements()
    print(f"{format_page(measurements, args.device)}\n{measurements['seconds']:.0f} s")


if __name__ == "__main__":
    main()
