"""The examples of sweeps: Optuna on two ranks, killed and continued, and Ray Tune with two workers for each trial."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
QUICK = {"RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2", "RAY_ADDRESS": "local"}
pytestmark = [pytest.mark.timeout(900), pytest.mark.slow]
LAUNCH = ("-m", "hasten", "launch", "--cpu", "--num_processes", "2", "examples/sweep_optuna.py")


def start(*words: str) -> subprocess.Popen[str]:
    """Start a program in a group of its own."""
    env = {**os.environ, **QUICK, "OMP_NUM_THREADS": "1"}
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
    return list(optuna.load_study(study_name="digits", storage=optuna.storages.JournalStorage(journal)).trials)


def test_a_killed_optuna_search_on_two_ranks_continues_its_trial(tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    size = ("--trials", "3", "--epochs", "3", "--out")
    text = output(start(*LAUNCH, *size, str(whole)))
    assert "best of 3" in text

    process = start(*LAUNCH, *size, str(killed))
    while not (killed / "trial_1" / "manifest.json").exists() and process.poll() is None:
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    text = output(start(*LAUNCH, *size, str(killed)))
    assert re.search(r"trial 2 continues after step (23|46|69)", text), text
    assert "best of 3" in text

    expected, found = trials(whole), trials(killed)
    assert [trial.state.name for trial in found[:3]] == ["COMPLETE", "FAIL", "COMPLETE"]
    assert [found[0].value, found[2].value] == [expected[0].value, expected[1].value]
    assert found[2].params == expected[1].params
    assert found[2].intermediate_values == expected[1].intermediate_values
    assert not list(killed.glob("trial_*")), "checkpoints of finished trials are deleted"


def test_ranks_prune_a_bad_trial_together(tmp_path: Path) -> None:
    text = output(start(*LAUNCH, "--trials", "5", "--epochs", "3", "--out", str(tmp_path)))
    states = [trial.state.name for trial in trials(tmp_path)]
    assert states.count("PRUNED") == text.count("pruned") > 0
    assert set(states) == {"COMPLETE", "PRUNED"}


def test_ray_tune_finds_the_best_of_its_trials(tmp_path: Path) -> None:
    text = output(start("examples/sweep_ray.py", "--trials", "2", "--epochs", "2", "--out", str(tmp_path)))
    found = re.findall(r"best of 2: ([\d.]+)% with lr", text)
    assert found, text[-4000:]
    assert float(found[-1]) > 50
