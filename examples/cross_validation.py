"""Cross-validation: one model per fold, one tracked run per fold, and the mean of their probabilities on the test set.

hasten launch --cpu --num_processes 2 examples/cross_validation.py
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from digits import build_network, load_digit_sets
from sklearn.model_selection import StratifiedKFold
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset, TensorDataset

from hasten import Accelerator, set_seed

Images = DataLoader[tuple[Tensor, ...]]


def main() -> None:
    """Train a model on every fold, then average their probabilities."""
    parser = argparse.ArgumentParser(
        description="Cross-validate, then let the folds vote."
    )
    parser.add_argument("--folds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("runs/cross_validation"),
        help="folder for metrics",
    )
    args = parser.parse_args()
    accelerator = Accelerator(log_with="jsonl", project_dir=args.out)

    train_set, test_set = load_digit_sets()
    test = accelerator.prepare(DataLoader(test_set, batch_size=128))
    splits = StratifiedKFold(args.folds, shuffle=True, random_state=0).split(
        *train_set.tensors
    )
    scores, votes, truth = [], torch.zeros(len(test_set), 10), torch.empty(0)
    for fold, (train_indices, held_out_indices) in enumerate(splits, 1):
        set_seed(fold)
        # ends the run of the previous fold
        accelerator.init_trackers(f"fold{fold}", config=vars(args))
        score, model = train_fold(
            accelerator,
            train_set,
            list(train_indices),
            list(held_out_indices),
            args.epochs,
        )
        scores.append(score)
        probabilities, truth = predict_probabilities(accelerator, model, test)
        votes += probabilities
        accelerator.print(f"fold {fold}: {score:.2%} of its held-out part")
        accelerator.free_memory(model)
    together = (votes.argmax(dim=1) == truth).float().mean().item()
    accelerator.print(
        f"mean of folds {sum(scores) / len(scores):.2%}; together {together:.2%} of the test set"
    )
    accelerator.end_training()


def train_fold(
    accelerator: Accelerator,
    data: TensorDataset,
    train_indices: list[int],
    held_out_indices: list[int],
    epochs: int,
) -> tuple[float, nn.Module]:
    """Train on the kept part; return the accuracy on the held-out part, and the model."""
    model = build_network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    train: Images = DataLoader(Subset(data, train_indices), batch_size=32, shuffle=True)
    check: Images = DataLoader(Subset(data, held_out_indices), batch_size=128)
    model, optimizer, train, check = accelerator.prepare(model, optimizer, train, check)
    for _ in range(epochs):
        model.train()
        for images, labels in train:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images), labels)
            accelerator.backward(loss)
            optimizer.step()
            accelerator.log({"loss": loss})
    probabilities, truth = predict_probabilities(accelerator, model, check)
    score = (probabilities.argmax(dim=1) == truth).float().mean().item()
    accelerator.log({"accuracy": score})
    return score, model


def predict_probabilities(
    accelerator: Accelerator, model: nn.Module, loader: Images
) -> tuple[Tensor, Tensor]:
    """Return the probabilities and the truth of every sample, each once, on every process."""
    model.eval()
    gathered_batches = []
    with torch.no_grad():
        for images, labels in loader:
            gathered_batches.append(
                accelerator.gather_for_metrics((model(images).softmax(dim=1), labels))
            )
    return torch.cat([tensor.cpu() for tensor, _ in gathered_batches]), torch.cat(
        [tensor.cpu() for _, tensor in gathered_batches]
    )


if __name__ == "__main__":
    main()
