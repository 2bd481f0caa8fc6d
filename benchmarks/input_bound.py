"""A loop whose input copy takes about as long as its compute: side by side with bare torch, Accelerate and Fabric.

    python benchmarks/input_bound.py --device cuda    # 154 MB batches, pinned
    python benchmarks/input_bound.py                  # a small run on the CPU, to see that it works

The goal is a step of 1.15 times the longer of copy and compute; without overlap it is their sum.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from loading import prepared_by_all, report_rows, summarize_times, take_turns
from torch import Tensor
from torch.utils.data import DataLoader, Dataset


class Pinned(Dataset[dict[str, Tensor]]):
    """Batches that lie ready in pinned memory: reading costs nothing, so that copy and compute are all there is."""

    def __init__(
        self, device: torch.device, shape: tuple[int, ...], steps: int
    ) -> None:
        self.batches = [{"x": torch.randn(shape)} for _ in range(4)]
        if device.type != "cpu":
            self.batches = [{"x": batch["x"].pin_memory()} for batch in self.batches]
        self.steps = steps

    def __len__(self) -> int:
        return self.steps

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self.batches[index % len(self.batches)]


def as_is(batch: Any) -> Any:
    return batch


def make_products(device: torch.device, rounds: int) -> Callable[[Tensor], None]:
    """Matrix products of about 3.2 ms on an H200, then one look at the batch."""
    side = 8192 if device.type != "cpu" else 128
    weight = torch.randn(
        side,
        side,
        device=device,
        dtype=torch.bfloat16 if device.type != "cpu" else torch.float32,
    )

    def compute(x: Tensor) -> None:
        for _ in range(rounds):
            weight @ weight
        x.view(-1)[:1].add_(0)

    return compute


def wait_for_device(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize()


def make_loop(
    loader: Iterable[Any],
    compute: Callable[[Tensor], None] | None,
    device: torch.device,
) -> Callable[[], int]:
    def loop() -> int:
        count = 0
        for batch in loader:
            if compute is not None:
                compute(batch["x"])
            count += 1
        wait_for_device(device)
        return count

    return loop


def time_loop(run: Callable[[], int]) -> float:
    times = []
    for _ in range(4):
        start_time = time.perf_counter()
        count = run()
        times.append((time.perf_counter() - start_time) / count * 1e3)
    return min(times)


def by_side_stream(loader: Iterable[Any], device: torch.device) -> Iterable[Any]:
    """The hand-written prefetch: one batch ahead, copied on a stream of its own."""

    class Ahead:
        def __iter__(self) -> Any:
            stream = torch.cuda.Stream(device)
            current = torch.cuda.current_stream(device)

            def sent(batch: dict[str, Tensor]) -> dict[str, Tensor]:
                with torch.cuda.stream(stream):
                    return {
                        key: value.to(device, non_blocking=True)
                        for key, value in batch.items()
                    }

            source = iter(loader)
            ahead = next(source, None)
            ahead = None if ahead is None else sent(ahead)
            while ahead is not None:
                current.wait_stream(stream)
                batch = ahead
                for value in batch.values():
                    value.record_stream(current)
                following = next(source, None)
                ahead = None if following is None else sent(following)
                yield batch

    return Ahead()


def measure_contenders(
    device: torch.device, rounds: int, products: int = 0
) -> dict[str, Any]:
    """One row: copy and compute alone, and each contender's step."""
    on_gpu = device.type != "cpu"
    data = Pinned(
        device, (256, 3, 224, 224) if on_gpu else (8, 3, 32, 32), 60 if on_gpu else 20
    )

    def make_loader() -> DataLoader[Any]:
        return DataLoader(data, batch_size=None, collate_fn=as_is)

    loaders = prepared_by_all(make_loader, device)
    if on_gpu:
        loaders["bare torch, side stream"] = by_side_stream(make_loader(), device)
    copy = time_loop(make_loop(loaders["bare torch"], None, device))
    product_ms = time_loop(_compute_only(make_products(device, 8), device)) / 8
    products = products or (max(round(3.2 / product_ms), 1) if on_gpu else 2)
    compute = make_products(device, products)
    compute_ms = time_loop(_compute_only(compute, device))
    passes = {
        name: make_loop(loader, compute, device) for name, loader in loaders.items()
    }
    row: dict[str, Any] = {
        "batch (MB)": data.batches[0]["x"].nbytes / 1e6,
        "copy alone (ms)": copy,
    }
    row["compute alone (ms)"] = compute_ms
    for name, numbers in summarize_times(take_turns(passes, rounds)).items():
        row[f"{name} (ms)"] = numbers["milliseconds"]
        row[f"{name} / max(copy, compute)"] = numbers["milliseconds"] / max(
            copy, compute_ms
        )
    return row


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument(
        "--rounds",
        type=int,
        default=0,
        help="matrix products a step (default: about 3.2 ms of them)",
    )
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    args = parser.parse_args()
    device = torch.device(args.device)
    row = measure_contenders(
        device, 3 if args.quick or args.device == "cpu" else 12, args.rounds
    )
    report_rows("input_bound", "Input-bound loop", [row], args.device)


def _compute_only(
    compute: Callable[[Tensor], None], device: torch.device
) -> Callable[[], int]:
    x = torch.zeros(8, device=device)

    def run() -> int:
        for _ in range(30):
            compute(x)
        wait_for_device(device)
        return 30

    return run


if __name__ == "__main__":
    main()
