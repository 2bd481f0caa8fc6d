"""Local SGD: processes train independently and average their weights every few steps, for slow networks.

hasten launch --cpu --num_processes 2 examples/local_sgd.py --local_sgd_steps 8
"""

from __future__ import annotations

import argparse
import time

import torch
from digits import build_network, load_digit_sets, measure_accuracy
from torch import nn
from torch.utils.data import DataLoader

from hasten import Accelerator, LocalSGD, set_seed


def main() -> None:
    """Train with averaged weights instead of averaged gradients."""
    parser = argparse.ArgumentParser(
        description="Average weights every few steps instead of gradients every step."
    )
    parser.add_argument(
        "--local_sgd_steps", type=int, default=8, help="steps between two averages"
    )
    parser.add_argument("--epochs", type=int, default=8)
    args = parser.parse_args()
    set_seed(0)
    accelerator = Accelerator()

    train_set, test_set = load_digit_sets()
    model = build_network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    train, test = (
        DataLoader(train_set, batch_size=32, shuffle=True),
        DataLoader(test_set, batch_size=128),
    )
    model, optimizer, train, test = accelerator.prepare(model, optimizer, train, test)

    start, steps = time.perf_counter(), 0
    for epoch in range(1, args.epochs + 1):
        model.train()
        with LocalSGD(
            accelerator=accelerator, model=model, local_sgd_steps=args.local_sgd_steps
        ) as local_sgd:
            for images, labels in train:
                optimizer.zero_grad()
                accelerator.backward(nn.functional.cross_entropy(model(images), labels))
                optimizer.step()
                # averages the weights every `local_sgd_steps` steps, and at the end of the block
                local_sgd.step()
                steps += 1
        accelerator.print(
            f"epoch {epoch}: {measure_accuracy(accelerator, model, test):.2%} of held-out digits"
        )
    seconds = time.perf_counter() - start
    exchanges = args.epochs * -(-(steps // args.epochs) // args.local_sgd_steps)
    accelerator.print(
        f"{steps} steps in {seconds:.1f} s, weights averaged about {exchanges} times"
    )
    accelerator.end_training()


if __name__ == "__main__":
    main()
