"""Save often, stop anywhere, resume at the next batch: the loss curve equals that of an uninterrupted run.

hasten launch --cpu --num_processes 2 examples/resume.py --stop_after 20        as if the machine went away
hasten launch --cpu --num_processes 2 examples/resume.py                        resumes after step 20

The checksum of the weights at the end is that of an uninterrupted run. On a GPU it also differs between two uninterrupted runs, because
torch's convolutions do; with torch.use_deterministic_algorithms(True) and CUBLAS_WORKSPACE_CONFIG=:4096:8 all of them are equal.
"""

from __future__ import annotations

import argparse
import hashlib
from pathlib import Path

import torch
from digits import build_network, load_digit_sets, measure_accuracy
from torch import nn
from torch.utils.data import DataLoader

from hasten import Accelerator, ProjectConfiguration, set_seed


def main() -> None:
    """Train with a checkpoint every few steps, from the newest one if there is one."""
    parser = argparse.ArgumentParser(description="Train, stop, resume.")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument(
        "--save_every", type=int, default=10, help="steps between two checkpoints"
    )
    parser.add_argument(
        "--stop_after", type=int, help="leave without a word after this many steps"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("runs/resume"),
        help="folder for checkpoints and metrics",
    )
    args = parser.parse_args()
    set_seed(0)
    project = ProjectConfiguration(
        project_dir=str(args.out), automatic_checkpoint_naming=True, total_limit=3
    )
    accelerator = Accelerator(project_config=project, log_with="jsonl")

    train_set, test_set = load_digit_sets()
    model = build_network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    train, test = (
        DataLoader(train_set, batch_size=32, shuffle=True),
        DataLoader(test_set, batch_size=128),
    )
    model, optimizer, schedule, train, test = accelerator.prepare(
        model, optimizer, schedule, train, test
    )
    accelerator.init_trackers("resume", config=vars(args))
    # from the newest complete checkpoint, if there is one
    if accelerator.load_state(must_exist=False):
        accelerator.print(
            f"going on after step {optimizer.num_updates} in epoch {train.epoch + 1}"
        )

    # from the epoch of the checkpoint; the loader resumes at its next batch
    for _ in accelerator.epochs(args.epochs):
        model.train()
        for images, labels in train:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images), labels)
            accelerator.backward(loss)
            optimizer.step()
            schedule.step()
            step = optimizer.num_updates  # of the whole run
            accelerator.log({"loss": loss}, step=step)
            stopping = accelerator.preempted  # by SIGTERM, on any process
            if step % args.save_every == 0 or stopping:
                accelerator.save_state()
            if step == args.stop_after or stopping:
                accelerator.print(f"stopped after step {step}")
                accelerator.end_training()
                return
    score = measure_accuracy(accelerator, model, test)
    weights = torch.cat(
        [
            p.detach().flatten().cpu()
            for p in accelerator.unwrap_model(model).parameters()
        ]
    )
    print_of_weights = hashlib.sha256(weights.numpy().tobytes()).hexdigest()[:12]
    accelerator.print(
        f"step {optimizer.num_updates}: {score:.2%} of held-out digits, weights {print_of_weights}"
    )
    accelerator.end_training()


if __name__ == "__main__":
    main()
