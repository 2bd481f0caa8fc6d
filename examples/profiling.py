"""Profile a few steps: where the time goes, as a table here and as one trace per process for a trace viewer.

python examples/profiling.py --out runs/profile        then open the files in https://ui.perfetto.dev
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from digits import build_network, load_digit_sets
from torch import nn
from torch.utils.data import DataLoader

from hasten import Accelerator, ProfileKwargs, set_seed


def main() -> None:
    """Run some steps under the profiler and print the costliest operations."""
    parser = argparse.ArgumentParser(description="Profile a few training steps.")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rows", type=int, default=8, help="rows of the table")
    parser.add_argument(
        "--out", type=Path, default=Path("runs/profile"), help="folder for the traces"
    )
    args = parser.parse_args()
    set_seed(0)
    accelerator = Accelerator()

    train_set, _ = load_digit_sets()
    model = build_network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model, optimizer, train = accelerator.prepare(
        model, optimizer, DataLoader(train_set, batch_size=32, shuffle=True)
    )

    settings = ProfileKwargs(
        record_shapes=True, profile_memory=True, output_trace_dir=str(args.out)
    )
    with accelerator.profile(settings) as profiler:
        for _, (images, labels) in zip(range(args.steps), train, strict=False):
            optimizer.zero_grad()
            accelerator.backward(nn.functional.cross_entropy(model(images), labels))
            optimizer.step()
    table = profiler.key_averages().table(
        sort_by="self_cpu_time_total", row_limit=args.rows
    )
    accelerator.print(table)
    accelerator.print(
        f"traces of {accelerator.num_processes} process(es) are in {args.out}"
    )
    accelerator.end_training()


if __name__ == "__main__":
    main()
