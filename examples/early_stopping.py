"""Stop early, on every process at once: the one that finds no more progress sets a trigger, which all of them check.

hasten launch --cpu --num_processes 2 examples/early_stopping.py
"""

from __future__ import annotations

import argparse

import torch
from digits import build_network, load_digit_sets, measure_accuracy
from torch import nn
from torch.utils.data import DataLoader

from hasten import Accelerator, set_seed


class Patience:
    """Counts how often in a row a score has not improved."""

    def __init__(self, allowed: int) -> None:
        self.allowed, self.best, self.in_vain = allowed, float("-inf"), 0

    def exhausted(self, score: float) -> bool:
        """Record a score; return whether to stop."""
        self.in_vain = 0 if score > self.best else self.in_vain + 1
        self.best = max(self.best, score)
        return self.in_vain >= self.allowed


def main() -> None:
    """Train until the held-out accuracy has not improved for some epochs."""
    parser = argparse.ArgumentParser(
        description="Stop when held-out accuracy no longer improves."
    )
    parser.add_argument("--max_epochs", type=int, default=50)
    parser.add_argument(
        "--patience",
        type=int,
        default=3,
        help="epochs without a better score before stopping",
    )
    parser.add_argument("--lr", type=float, default=3e-3)
    args = parser.parse_args()
    set_seed(0)
    accelerator = Accelerator()

    train_set, test_set = load_digit_sets()
    model = build_network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    train, test = (
        DataLoader(train_set, batch_size=32, shuffle=True),
        DataLoader(test_set, batch_size=128),
    )
    model, optimizer, train, test = accelerator.prepare(model, optimizer, train, test)

    patience = Patience(args.patience)
    for epoch in accelerator.epochs(args.max_epochs):
        model.train()
        for images, labels in train:
            optimizer.zero_grad()
            accelerator.backward(nn.functional.cross_entropy(model(images), labels))
            optimizer.step()
        score = measure_accuracy(accelerator, model, test)
        accelerator.print(f"epoch {epoch + 1}: {score:.2%} of held-out digits")
        # any process may set the trigger; here the main process decides for all
        if accelerator.is_main_process and patience.exhausted(score):
            accelerator.set_trigger()
        if accelerator.check_trigger():
            accelerator.print(
                f"stopped after epoch {epoch + 1}: no better score in {args.patience} epochs"
            )
            break
    accelerator.end_training()


if __name__ == "__main__":
    main()
