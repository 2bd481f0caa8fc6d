"""The examples of sweeps: Optuna on two ranks, killed and continued, and Ray Tune with two workers for each trial."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.on_ray.toy import QUICK

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.timeout(900), pytest.mark.slow]
LAUNCH = (
    "-m",
    "hasten",
    "launch",
    "--cpu",
    "--num_processes",
    "2",
    "examples/sweep_optuna.py",
)


def start(*words: str) -> subprocess.Popen[str]:
    """Start a program in a group of its own."""
    env = {**os.environ, **QUICK, "OMP_NUM_THREADS": "1", "RAY_ADDRESS": "local"}
    return subprocess.Popen(
        [sys.executable, *words],
        cwd=ROOT,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def output(process: subprocess.Popen[str]) -> str:
    """Return the output of a program that must succeed."""
    text, _ = process.communicate(timeout=800)
    assert process.returncode == 0, text[-6000:]
    return text


def trials(folder: Path) -> list[Any]:
    """Return the trials of the study in a folder."""
    import optuna  # only in the environment of these tests

    journal = optuna.storages.journal.JournalFileBackend(str(folder / "study.journal"))
    return list(
        optuna.load_study(
            study_name="digits", storage=optuna.storages.JournalStorage(journal)
        ).trials
    )


def test_a_killed_optuna_search_on_two_ranks_continues_its_trial(
    tmp_path: Path,
) -> None:
    plain_folder, killed = tmp_path / "whole", tmp_path / "killed"
    size = ("--trials", "3", "--epochs", "3", "--out")
    text = output(start(*LAUNCH, *size, str(plain_folder)))
    assert "best of 3" in text

    process = start(*LAUNCH, *size, str(killed))
    while (
        not (killed / "trial_1" / "manifest.json").exists() and process.poll() is None
    ):
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    text = output(start(*LAUNCH, *size, str(killed)))
    assert re.search(r"trial 2 continues after step (23|46|69)", text), text
    assert "best of 3" in text

    expected, continued_trials = trials(plain_folder), trials(killed)
    assert [trial.state.name for trial in continued_trials[:3]] == [
        "COMPLETE",
        "FAIL",
        "COMPLETE",
    ]
    assert [continued_trials[0].value, continued_trials[2].value] == [
        expected[0].value,
        expected[1].value,
    ]
    assert continued_trials[2].params == expected[1].params
    assert continued_trials[2].intermediate_values == expected[1].intermediate_values
    assert not list(killed.glob("trial_*")), (
        "checkpoints of finished trials are deleted"
    )


def test_ranks_prune_a_bad_trial_together(tmp_path: Path) -> None:
    text = output(
        start(*LAUNCH, "--trials", "5", "--epochs", "3", "--out", str(tmp_path))
    )
    states = [trial.state.name for trial in trials(tmp_path)]
    assert states.count("PRUNED") == text.count("pruned") > 0
    assert set(states) == {"COMPLETE", "PRUNED"}


def test_ray_tune_stops_a_bad_trial_and_finds_the_best(tmp_path: Path) -> None:
    """The second and third trial of this seed are worse than the first: they are stopped after an epoch, which frees their workers."""
    size = ("--seed", "5", "--trials", "3", "--epochs", "2", "--out", str(tmp_path))
    text = output(start("examples/sweep_ray.py", *size))
    best_scores = re.findall(r"best of 3: ([\d.]+)% with lr", text)
    assert best_scores, text[-4000:]
    results = [
        file.read_text().splitlines()
        for file in sorted(tmp_path.glob("search/run_trial_*/result.json"))
    ]
    scores = [[json.loads(line)["accuracy"] for line in lines] for lines in results]
    assert [len(trial_scores) for trial_scores in scores] == [2, 1, 1], (
        "epochs of each trial"
    )
    assert scores[1][0] < scores[0][0]
    assert float(best_scores[-1]) == pytest.approx(
        100 * max(map(max, scores)), abs=0.01
    )
    assert float(best_scores[-1]) > 50
