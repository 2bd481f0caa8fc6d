"""Upload a model to the Hub while it trains, and load it back: `hf auth login` or HF_TOKEN gives the token.

hasten launch --cpu --num_processes 2 examples/push_to_hub.py --repo NAME/digits
"""

from __future__ import annotations

import argparse

import torch
from digits import build_network, load_digit_sets, measure_accuracy
from torch import nn
from torch.utils.data import DataLoader

from hasten import Accelerator, set_seed


def main() -> None:
    """Train, push after each epoch in the background, and check that the Hub returns the same model."""
    parser = argparse.ArgumentParser(description="Push a model to the Hub.")
    parser.add_argument("--repo", required=True, help="such as your_name/digits")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--private", action="store_true")
    args = parser.parse_args()
    set_seed(0)
    accelerator = Accelerator()

    train_set, test_set = load_digit_sets()
    train, test = (
        DataLoader(train_set, batch_size=32, shuffle=True),
        DataLoader(test_set, batch_size=128),
    )
    model = build_network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    model, optimizer, train, test = accelerator.prepare(model, optimizer, train, test)
    for epoch in accelerator.epochs(args.epochs):
        model.train()
        for images, labels in train:
            accelerator.backward(nn.functional.cross_entropy(model(images), labels))
            optimizer.step()
            optimizer.zero_grad()
        accuracy = measure_accuracy(accelerator, model, test)
        accelerator.print(f"epoch {epoch + 1}: accuracy {accuracy:.2%}")
        accelerator.push_to_hub(  # the next epoch begins while the main process uploads
            model,
            args.repo,
            metrics={"accuracy": accuracy},
            private=args.private,
            blocking=False,
        )
    accelerator.end_training()  # waits for the last upload

    accelerator.load_model(model, f"hf://{args.repo}")
    accelerator.print(
        f"loaded from the Hub: accuracy {measure_accuracy(accelerator, model, test):.2%}"
    )


if __name__ == "__main__":
    main()
