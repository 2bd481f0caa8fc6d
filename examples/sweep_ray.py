"""A search by Ray Tune: every trial trains on workers of Ray Train, reports its score and is stopped early by ASHA.

python examples/sweep_ray.py --trials 4 --workers 2
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import ray
import torch
from digits import load_digit_sets, measure_accuracy
from ray import tune
from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from ray.tune.integration.ray_train import TuneReportCallback
from ray.tune.schedulers import ASHAScheduler
from ray.tune.search.basic_variant import BasicVariantGenerator
from torch import nn
from torch.utils.data import DataLoader

import hasten.ray
from hasten import Accelerator, set_seed


def main() -> None:
    """Search, and print the best trial."""
    parser = argparse.ArgumentParser(
        description="Search for hyperparameters with Ray Tune."
    )
    parser.add_argument("--trials", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument(
        "--workers", type=int, default=2, help="processes of each trial"
    )
    parser.add_argument(
        "--concurrent",
        type=int,
        default=1,
        help="trials at the same time; the cluster must hold their workers",
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="of the trials' hyperparameters"
    )
    parser.add_argument("--gpu", action="store_true", help="one GPU for each process")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("runs/sweep_ray"),
        help="folder for results and checkpoints",
    )
    args = parser.parse_args()
    # with its dashboard: Ray frees the workers of a stopped trial through it
    ray.init()
    space = {
        "lr": tune.loguniform(1e-4, 1e-1),
        "width": tune.choice([16, 32, 64]),
        "epochs": args.epochs,
        "workers": args.workers,
        "gpu": args.gpu,
        "out": str(args.out.absolute()),
    }
    tuner = tune.Tuner(
        # only the trial's workers reserve processors
        tune.with_resources(run_trial, {"CPU": 0, "memory": 1}),
        param_space=space,
        tune_config=tune.TuneConfig(
            metric="accuracy",
            mode="max",
            num_samples=args.trials,
            search_alg=BasicVariantGenerator(
                max_concurrent=args.concurrent, random_state=args.seed
            ),
            # the last epoch ends a trial by itself
            scheduler=ASHAScheduler(max_t=args.epochs + 1, grace_period=1),
        ),
        run_config=tune.RunConfig(name="search", storage_path=str(args.out.absolute())),
    )
    best = tuner.fit().get_best_result()
    print(
        f"best of {args.trials}: {best.metrics['accuracy']:.2%} with lr {best.config['lr']:.2g} and width {best.config['width']}"
    )


def run_trial(config: dict[str, Any]) -> None:
    """Train one trial on its workers; a lost worker restarts them from the last checkpoint of the trial."""
    trainer = TorchTrainer(
        train_loop,
        train_loop_config=config,
        scaling_config=ScalingConfig(
            num_workers=config["workers"], use_gpu=config["gpu"]
        ),
        run_config=RunConfig(
            name=f"trial_{tune.get_context().get_trial_id()}",
            storage_path=config["out"],
            failure_config=FailureConfig(max_failures=1),
            checkpoint_config=CheckpointConfig(num_to_keep=1),
            callbacks=[TuneReportCallback()],  # passes on what hasten.ray.report sends
        ),
    )
    hasten.ray.fit(trainer)


def train_loop(config: dict[str, Any]) -> None:
    """Train on one worker: the loop of any script, with a report after each epoch."""
    set_seed(0)
    accelerator = Accelerator()
    train_set, test_set = load_digit_sets()
    width = config["width"]
    model: nn.Module = nn.Sequential(
        nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=config["lr"])
    loader, test = (
        DataLoader(train_set, batch_size=32, shuffle=True),
        DataLoader(test_set, batch_size=128),
    )
    model, optimizer, loader, test = accelerator.prepare(model, optimizer, loader, test)
    hasten.ray.resume(accelerator)
    for epoch in accelerator.epochs(config["epochs"]):
        model.train()
        for images, labels in loader:
            optimizer.zero_grad()
            accelerator.backward(nn.functional.cross_entropy(model(images), labels))
            optimizer.step()
        score = measure_accuracy(accelerator, model, test)
        hasten.ray.report(
            accelerator, {"accuracy": score, "training_iteration": epoch + 1}, save=True
        )


if __name__ == "__main__":
    main()
