"""Find the largest batch that fits: when memory runs out, all processes try again with a smaller one.

python examples/auto_batch_size.py
python examples/auto_batch_size.py --pretend_limit 100        pretend that 100 samples is all that fits
"""

from __future__ import annotations

import argparse

import torch
from digits import build_network, load_digit_sets, measure_accuracy
from torch import nn
from torch.utils.data import DataLoader

from hasten import Accelerator, find_executable_batch_size, set_seed


def main() -> None:
    """Train with whatever batch size fits, at an unchanged effective batch."""
    parser = argparse.ArgumentParser(
        description="Find the batch size that fits into memory."
    )
    parser.add_argument(
        "--batch_size",
        type=int,
        default=512,
        help="the first size to try, and the effective batch",
    )
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument(
        "--pretend_limit",
        type=int,
        help="raise an out-of-memory error above this many samples",
    )
    args = parser.parse_args()
    accelerator = Accelerator()

    # keep_global_batch: half the batch means twice the accumulation, so the result does not depend on the memory
    @find_executable_batch_size(
        starting_batch_size=args.batch_size,
        accelerator=accelerator,
        keep_global_batch=True,
    )
    def train_with(batch_size: int) -> float:
        accelerator.free_memory()  # free the objects of a failed attempt
        set_seed(0)
        steps = accelerator.gradient_accumulation_steps
        accelerator.print(
            f"trying {batch_size} samples a step, {steps} step(s) an update"
        )
        train_set, test_set = load_digit_sets()
        model = build_network()
        optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
        train, test = (
            DataLoader(train_set, batch_size=batch_size, shuffle=True),
            DataLoader(test_set, batch_size=128),
        )
        model, optimizer, train, test = accelerator.prepare(
            model, optimizer, train, test
        )
        for _ in range(args.epochs):
            model.train()
            for images, labels in train:
                if args.pretend_limit and len(labels) > args.pretend_limit:
                    raise torch.OutOfMemoryError(
                        f"pretended: {len(labels)} samples do not fit"
                    )
                with accelerator.accumulate(model):
                    accelerator.backward(
                        nn.functional.cross_entropy(model(images), labels)
                    )
                    optimizer.step()
                    optimizer.zero_grad()
        return measure_accuracy(accelerator, model, test)

    accelerator.print(f"accuracy {train_with():.2%} of held-out digits")
    accelerator.end_training()


if __name__ == "__main__":
    main()
