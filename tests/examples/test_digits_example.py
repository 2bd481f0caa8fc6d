"""The first example, run as a user runs it: two processes through the launcher, at reduced size."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from safetensors.torch import load_file
from torch.utils.data import DataLoader

import hasten

EXAMPLE: Final = Path(__file__).parents[2] / "examples" / "digits.py"
EPOCHS: Final = 5


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """Return what the example prints on two processes, and the folder it leaves."""
    folder = tmp_path_factory.mktemp("digits")
    launch: list[str | Path] = [
        Path(sys.executable).with_name("hasten"),
        "launch",
        "--cpu",
        "--num_processes",
        "2",
    ]
    command = [
        *launch,
        EXAMPLE,
        "--epochs",
        str(EPOCHS),
        "--target",
        "0.9",
        "--out",
        folder,
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=100
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr, folder


@pytest.fixture(scope="module")
def example() -> dict[str, Any]:
    """Return the names the example defines; a fixture, because scikit-learn sets variables when it is imported."""
    return runpy.run_path(str(EXAMPLE))


def curve(folder: Path, name: str) -> list[float]:
    """Return the values of one metric in order of steps, read from the run's file."""
    (file,) = folder.glob("metrics/*/metrics.jsonl")
    return [row[name] for row in hasten.read_metrics(file) if name in row]


def test_closing_table_tells_what_came_out(run: tuple[str, Path]) -> None:
    printed, _ = run
    assert "2 × cpu" in printed
    assert printed.count("hasten · digits") == 1, "one process prints"
    assert "Warning" not in printed
    assert "Traceback" not in printed


def test_metrics_hold_every_step_and_epoch(run: tuple[str, Path]) -> None:
    losses, scores = curve(run[1], "loss"), curve(run[1], "accuracy")
    assert len(losses) == EPOCHS * 23, (
        "1437 digits make 45 batches of 32, 23 for each of two processes"
    )
    assert len(scores) == EPOCHS
    assert losses[-1] < losses[0] / 4


def test_plot_is_a_png(run: tuple[str, Path]) -> None:
    data = (run[1] / "loss.png").read_bytes()
    assert data.startswith(b"\x89PNG")
    assert len(data) > 10_000


def test_saved_model_is_as_good_in_plain_torch(
    run: tuple[str, Path], example: dict[str, Any]
) -> None:
    model: torch.nn.Module = example["build_network"]()
    model.load_state_dict(load_file(run[1] / "model" / "model.safetensors"))
    model.eval()
    _, test_set = example["load_digit_sets"]()
    images, labels = next(iter(DataLoader(test_set, batch_size=len(test_set))))
    with torch.no_grad():
        accuracy = (model(images).argmax(dim=1) == labels).float().mean().item()
    reported = curve(run[1], "accuracy")[-1]
    assert accuracy == pytest.approx(reported, abs=0.003), (
        "each held-out digit is counted once: 360 of them"
    )


def test_loop_has_three_changed_lines() -> None:
    text = EXAMPLE.read_text("utf-8")
    assert [f"{i} of 3" in text for i in (1, 2, 3)] == [True, True, True]
