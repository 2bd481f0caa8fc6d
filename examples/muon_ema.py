"""Muon for the hidden matrices, AdamW for the rest, and a moving average of the weights for evaluation and export.

hasten launch --cpu --num_processes 2 examples/muon_ema.py
"""

from __future__ import annotations

import argparse

from digits import load_digit_sets, measure_accuracy
from torch import nn
from torch.utils.data import DataLoader

import hasten
from hasten import Accelerator, set_seed


def main() -> None:
    """Train on scanned digits, and compare the trained weights with their average on the test set."""
    parser = argparse.ArgumentParser(
        description="Train with Muon and a moving average."
    )
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--decay", type=float, default=0.95)
    parser.add_argument("--out", default="runs/muon_ema")
    args = parser.parse_args()
    set_seed(0)
    accelerator = Accelerator()

    train_set, test_set = load_digit_sets()
    train, test = (
        DataLoader(train_set, batch_size=32, shuffle=True),
        DataLoader(test_set, batch_size=128),
    )
    model = nn.Sequential(
        nn.Flatten(),
        nn.Linear(64, 64),
        nn.ReLU(),
        nn.Linear(64, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )
    # prints which tensors go where
    optimizers = hasten.optimizers(model, kind="muon", lr=0.01, adamw_lr=1e-3)
    model, train, test, *optimizers = accelerator.prepare(
        model, train, test, *optimizers
    )
    # updated by every optimizer step, saved by save_state()
    ema = accelerator.ema(model, decay=args.decay)

    for epoch in accelerator.epochs(args.epochs):
        model.train()
        for images, labels in train:
            accelerator.backward(nn.functional.cross_entropy(model(images), labels))
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        trained = measure_accuracy(accelerator, model, test)
        with ema.swapped():
            averaged = measure_accuracy(accelerator, model, test)
        accelerator.print(
            f"epoch {epoch + 1}: accuracy {trained:.2%}, of the average {averaged:.2%}"
        )
    with ema.swapped():
        accelerator.save_model(model, args.out)
    accelerator.end_training()


if __name__ == "__main__":
    main()
