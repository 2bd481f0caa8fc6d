"""Learn handwritten digits on any number of processes: a plain PyTorch loop with three changed lines.

python examples/digits.py                                       one process, whatever device is there
hasten launch --cpu --num_processes 2 examples/digits.py        two processes (this is `make train`)
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from hasten import Accelerator, set_seed

INK, SOFT, ACCENT = "#1b3a4b", "#9db4c0", "#c8553d"


def main() -> None:
    """Train, evaluate after each epoch, and write metrics, a plot and the model to the output folder."""
    args = read_arguments()
    set_seed(args.seed)
    # 1 of 3: detect the processes and the device
    accelerator = Accelerator(log_with="jsonl", project_dir=args.out)

    train_set, test_set = load_digit_sets()
    train = DataLoader(train_set, batch_size=32, shuffle=True)
    test = DataLoader(test_set, batch_size=128)
    model = build_network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=1e-2)
    steps = args.epochs * -(-len(train) // accelerator.num_processes)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=4e-3, total_steps=steps
    )
    # 2 of 3: distribute model and data over the processes
    model, optimizer, train, test, scheduler = accelerator.prepare(
        model, optimizer, train, test, scheduler
    )

    accelerator.init_trackers("metrics", config=vars(args))
    losses: list[float] = []
    scores: list[float] = []
    start = time.perf_counter()
    with accelerator.progress(total=steps, desc="training") as bar:
        for _ in accelerator.epochs(args.epochs):
            model.train()
            for images, labels in train:
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(images), labels)
                accelerator.backward(loss)  # 3 of 3: instead of loss.backward()
                optimizer.step()
                scheduler.step()
                losses.append(accelerator.reduce(loss.detach(), "mean").item())
                accelerator.log({"loss": losses[-1]}, step=len(losses))
                bar.show(loss=losses[-1])
                bar.update(samples=len(labels))
            scores.append(measure_accuracy(accelerator, model, test))
            accelerator.log({"accuracy": scores[-1]}, step=len(losses))
            bar.show(accuracy=f"{scores[-1]:.2%}")
    seconds = time.perf_counter() - start

    accelerator.save_state(args.out / "checkpoint")
    accelerator.save_model(model, args.out / "model")
    if accelerator.is_main_process:
        plot_curves(args.out / "loss.png", losses, scores)
        finish_run(accelerator, args, losses, scores, seconds)
    accelerator.end_training()
    if scores[-1] < args.target:
        sys.exit(
            f"accuracy {scores[-1]:.2%} is below the target of {args.target:.0%}; train longer with --epochs"
        )


def measure_accuracy(
    accelerator: Accelerator, model: nn.Module, loader: DataLoader[tuple[Tensor, ...]]
) -> float:
    """Return the share of the test set that the model names correctly, counting each sample once."""
    model.eval()
    right = total = 0
    with torch.no_grad():
        for images, labels in loader:
            guesses, truth = accelerator.gather_for_metrics(
                (model(images).argmax(dim=1), labels)
            )
            right += int((guesses == truth).sum())
            total += len(truth)
    return right / total


def load_digit_sets() -> tuple[TensorDataset, TensorDataset]:
    """Return scikit-learn's 1797 scanned digits of 8 by 8 pixels, four fifths of them for training."""
    images, labels = load_digits(return_X_y=True)
    pixels = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
    names = torch.tensor(labels, dtype=torch.long)
    train_indices, test_indices = train_test_split(
        range(len(names)), test_size=0.2, random_state=0, stratify=labels
    )
    return TensorDataset(pixels[train_indices], names[train_indices]), TensorDataset(
        pixels[test_indices], names[test_indices]
    )


def build_network() -> nn.Module:
    """Return a small convolutional network: 8 by 8 pixels in, ten scores out."""
    return nn.Sequential(
        *(nn.Conv2d(1, 32, 3, padding=1), nn.ReLU()),
        *(nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(
            nn.Flatten(),
            nn.Dropout(0.25),
            nn.Linear(64 * 4 * 4, 128),
            nn.ReLU(),
            nn.Linear(128, 10),
        ),
    )


def read_arguments() -> argparse.Namespace:
    """Return the command line's settings."""
    parser = argparse.ArgumentParser(
        description="Learn handwritten digits on any number of processes."
    )
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--target",
        type=float,
        default=0.97,
        help="fail if the accuracy ends below this share",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("runs/digits"),
        help="folder for metrics, plot and model",
    )
    return parser.parse_args()


def plot_curves(file: Path, losses: list[float], scores: list[float]) -> None:
    """Plot the loss of every step, its running mean, and the accuracy after each epoch."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    steps = range(1, len(losses) + 1)
    smooth = [
        sum(window) / len(window)
        for end in steps
        if (window := losses[max(0, end - 20) : end])
    ]
    left.plot(steps, losses, color=SOFT, linewidth=0.8, label="each step")
    left.plot(steps, smooth, color=INK, linewidth=2, label="mean of the last 20")
    left.set(title="Training loss", xlabel="step", ylabel="cross-entropy", yscale="log")
    left.legend(frameon=False)
    epochs = range(1, len(scores) + 1)
    right.plot(
        epochs,
        [100 * score for score in scores],
        color=INK,
        linewidth=2,
        marker="o",
        markersize=4,
    )
    right.axhline(97, color=ACCENT, linewidth=1, linestyle="--")
    right.annotate(
        "97 %", (1, 97), xytext=(0, 4), textcoords="offset points", color=ACCENT
    )
    right.set(title="Accuracy on held-out digits", xlabel="epoch", ylabel="%")
    right.xaxis.get_major_locator().set_params(integer=True)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(file, dpi=120)


def finish_run(
    accelerator: Accelerator,
    args: argparse.Namespace,
    losses: list[float],
    scores: list[float],
    seconds: float,
) -> None:
    """Print the results and the paths of the files."""
    table = Table(title="hasten · digits", title_justify="left", show_header=False)
    table.add_column(style="dim")
    table.add_column()
    table.add_row(
        "processes", f"{accelerator.num_processes} × {accelerator.device.type}"
    )
    table.add_row("steps", f"{len(losses)} in {len(scores)} epochs")
    table.add_row(
        "time", f"{seconds:.1f} s, {seconds / len(losses) * 1e3:.1f} ms a step"
    )
    table.add_row(
        "loss", f"{losses[0]:.3f} → {sum(losses[-20:]) / len(losses[-20:]):.4f}"
    )
    table.add_row(
        "accuracy",
        f"[bold green]{scores[-1]:.2%}[/] on held-out digits (best {max(scores):.2%})",
    )
    metrics = accelerator.get_tracker("jsonl", unwrap=True)
    table.add_row(
        "files",
        f"{metrics}/metrics.jsonl\n{args.out}/loss.png\n{args.out}/model\n{args.out}/checkpoint",
    )
    Console().print(table)


if __name__ == "__main__":
    main()
