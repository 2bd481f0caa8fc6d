"""A search by Optuna over all processes: rank 0 asks, all train the same trial and prune it together; a killed search continues.

hasten launch --cpu --num_processes 2 examples/sweep_optuna.py --trials 8
hasten launch --cpu --num_processes 2 examples/sweep_optuna.py --trials 8         after a kill: continues in the epoch of its last trial
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import Any

import optuna
import torch
from digits import load_digit_sets, measure_accuracy
from optuna.trial import TrialState
from torch import nn
from torch.utils.data import DataLoader

from hasten import Accelerator, Process, set_seed


def main() -> None:
    """Run trials until the study holds as many as asked for, including those of earlier calls."""
    parser = argparse.ArgumentParser(
        description="Search for hyperparameters with Optuna's ask and tell."
    )
    parser.add_argument(
        "--trials",
        type=int,
        default=8,
        help="completed and pruned trials of the whole study",
    )
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("runs/sweep_optuna"),
        help="folder for study and checkpoints",
    )
    args = parser.parse_args()
    # one process writes, the others only train
    study = open_study(args.out) if Process().is_main_process else None
    while True:
        # one for each trial, because a checkpoint holds the state of one training
        accelerator = Accelerator()
        trial, trial_settings = ask_trial(study, args.trials)
        # all ranks train what rank 0 was given
        (trial_settings,) = accelerator.broadcast_object_list([trial_settings])
        if trial_settings is None:
            break
        score, pruned = train_trial(accelerator, trial, trial_settings, args)
        if study is not None and trial is not None:
            study.tell(
                trial,
                None if pruned else score,
                TrialState.PRUNED if pruned else TrialState.COMPLETE,
            )
            shutil.rmtree(args.out / trial_settings["folder"], ignore_errors=True)
        accelerator.print(
            f"trial {trial_settings['number']} {trial_settings['params']}: {score:.2%}{', pruned' if pruned else ''}"
        )
        accelerator.end_training()
    if study is not None:
        print(
            f"best of {len(finished_trials(study))}: {study.best_value:.2%} with {study.best_params}"
        )
    accelerator.end_training()


def open_study(folder: Path) -> optuna.Study:
    """Return the study in the folder, with its interrupted trials queued again. Ranks: main only."""
    folder.mkdir(parents=True, exist_ok=True)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    journal = optuna.storages.journal.JournalFileBackend(str(folder / "study.journal"))
    study = optuna.create_study(
        study_name="digits",
        storage=optuna.storages.JournalStorage(journal),  # or "sqlite:///…"
        direction="maximize",
        load_if_exists=True,
        pruner=optuna.pruners.MedianPruner(n_startup_trials=2, n_warmup_steps=1),
    )
    earlier_trials = study.get_trials(deepcopy=False)
    # a new seed, or a second call would draw the same
    study.sampler = optuna.samplers.TPESampler(seed=len(earlier_trials))
    for left in (
        trial for trial in earlier_trials if trial.state == TrialState.RUNNING
    ):
        study.tell(left.number, state=TrialState.FAIL)
        # The new trial has the same values and continues from the same checkpoint, with the reports made so far.
        reports = {
            str(epoch): value for epoch, value in left.intermediate_values.items()
        }
        study.enqueue_trial(
            left.params, user_attrs={**left.user_attrs, "reports": reports}
        )
    return study


def finished_trials(study: optuna.Study) -> list[optuna.trial.FrozenTrial]:
    """Return the trials that are complete or pruned."""
    return study.get_trials(
        deepcopy=False, states=(TrialState.COMPLETE, TrialState.PRUNED)
    )


def ask_trial(
    study: optuna.Study | None, trials: int
) -> tuple[optuna.Trial | None, dict[str, Any] | None]:
    """Return the next trial and its plain values; nothing if the study has enough trials, and on ranks without the study."""
    if study is None or len(finished_trials(study)) >= trials:
        return None, None
    trial = study.ask()
    params = {
        "lr": trial.suggest_float("lr", 1e-4, 1e-1, log=True),
        "width": trial.suggest_categorical("width", [16, 32, 64]),
        "dropout": trial.suggest_float("dropout", 0.0, 0.5),
    }
    if "folder" not in trial.user_attrs:
        trial.set_user_attr("folder", f"trial_{trial.number}")
    score = 0.0
    for epoch, score in trial.user_attrs.get("reports", {}).items():
        trial.report(score, int(epoch))
    return trial, {
        "number": trial.number,
        "params": params,
        "folder": trial.user_attrs["folder"],
        "score": score,
    }


def train_trial(
    accelerator: Accelerator,
    trial: optuna.Trial | None,
    trial_settings: dict[str, Any],
    args: argparse.Namespace,
) -> tuple[float, bool]:
    """Train one trial, from its checkpoint if there is one; return its score and whether it was pruned."""
    params, folder = trial_settings["params"], args.out / trial_settings["folder"]
    set_seed(0)
    train_set, test_set = load_digit_sets()
    model: nn.Module = nn.Sequential(
        *(
            nn.Flatten(),
            nn.Linear(64, params["width"]),
            nn.ReLU(),
            nn.Dropout(params["dropout"]),
        ),
        nn.Linear(params["width"], 10),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=params["lr"])
    loader, test = (
        DataLoader(train_set, batch_size=32, shuffle=True),
        DataLoader(test_set, batch_size=128),
    )
    model, optimizer, loader, test = accelerator.prepare(model, optimizer, loader, test)
    if (folder / "manifest.json").exists():  # a complete checkpoint
        accelerator.load_state(folder)
        accelerator.print(
            f"trial {trial_settings['number']} continues after step {optimizer.num_updates}"
        )
    score, pruned = trial_settings["score"], False
    for epoch in accelerator.epochs(args.epochs):
        model.train()
        for images, labels in loader:
            optimizer.zero_grad()
            accelerator.backward(nn.functional.cross_entropy(model(images), labels))
            optimizer.step()
        score = measure_accuracy(accelerator, model, test)
        if trial is not None:
            trial.report(score, epoch)
            pruned = trial.should_prune()
        # rank 0 decides, and all leave the loop together
        (pruned,) = accelerator.broadcast_object_list([pruned])
        if pruned:
            break
        accelerator.save_state(folder)
    return score, pruned


if __name__ == "__main__":
    main()
