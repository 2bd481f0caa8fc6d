"""Training under a real Ray Train on two CPU workers: equal to plain torch, also after a lost worker and a lost machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.on_ray.toy import QUICK, Numbered, network

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]


def run(name: str, folder: Path) -> dict[str, Any]:
    """Run one of programs.py and return what it found."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", "tests.on_ray.programs", name, str(folder)],
        env={**os.environ, **QUICK, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=550,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-6000:]
    report: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return report


def lines(file: Path) -> list[dict[str, Any]]:
    """Return the lines of a file of JSON."""
    return [json.loads(line) for line in file.read_text().splitlines()]


def steps(folder: Path) -> list[list[list[int]]]:
    """Return the samples of each update, by rank; an update made again after a restart replaces the first one and what followed."""
    starts, rank_lines = (
        lines(folder / "starts.jsonl"),
        [lines(file) for file in sorted(folder.glob("steps-*.jsonl"))],
    )
    resumed = min((line["step"] for line in starts if line["resumed"]), default=None)
    samples_by_step: dict[int, dict[int, list[int]]] = {}
    sizes: dict[int, int] = {}
    for rank in rank_lines:
        for line in rank:  # later lines of a rank are of later starts
            samples_by_step.setdefault(line["step"], {})[line["rank"]] = line["samples"]
            sizes[line["step"]] = (
                line["size"]
                if line["rank"] == 0
                else sizes.get(line["step"], line["size"])
            )
    assert sorted(samples_by_step) == list(range(1, len(samples_by_step) + 1)), (
        "no update is missing"
    )
    assert resumed is None or 0 < resumed < len(samples_by_step)
    return [
        [samples_by_step[step][rank] for rank in range(sizes[step])]
        for step in sorted(samples_by_step)
    ]


def reference(batches: Sequence[Sequence[Sequence[int]]]) -> dict[str, Tensor]:
    """Return the weights of a plain torch loop on one process that averages the gradients of each rank's batch."""
    data, model = Numbered(), network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for ranks in batches:
        gradients = []
        for samples in ranks:
            model.zero_grad()
            loss: Any = nn.functional.mse_loss(
                model(data.inputs[samples]), data.labels[samples]
            )
            loss.backward()
            gradients.append(
                [p.grad.clone() for p in model.parameters() if p.grad is not None]
            )
        for parameter, *rank_gradients in zip(
            model.parameters(), *gradients, strict=True
        ):
            parameter.grad = torch.stack(
                [gradient / len(ranks) for gradient in rank_gradients]
            ).sum(0)
        optimizer.step()
    return dict(model.state_dict())


def equal(folder: Path, expected: dict[str, Tensor]) -> bool:
    """Return whether the weights of a run are bitwise those expected."""
    trained_weights = torch.load(folder / "weights.pt")
    return trained_weights.keys() == expected.keys() and all(
        torch.equal(trained_weights[name], expected[name]) for name in expected
    )


def each_sample_once(
    batches: list[list[list[int]]], epochs: int = 2, samples: int = 96
) -> None:
    """Assert that every epoch holds every sample exactly once."""
    read_samples = [sample for ranks in batches for rank in ranks for sample in rank]
    for epoch in range(epochs):
        assert sorted(read_samples[epoch * samples : (epoch + 1) * samples]) == list(
            range(samples)
        )
    assert len(read_samples) == epochs * samples


def test_two_workers_train_as_plain_torch_also_after_one_was_killed(
    tmp_path: Path,
) -> None:
    plain_folder, killed = tmp_path / "whole", tmp_path / "killed"
    for folder in (plain_folder, killed):
        folder.mkdir()
    report = run("plain", plain_folder)
    assert report["metrics"]["step"] == 24
    assert report["kept"] == 2, "Ray deletes old checkpoints by its CheckpointConfig"
    assert Path(report["checkpoint"], "manifest.json").exists() or any(
        Path(report["checkpoint"]).iterdir()
    )
    batches = steps(plain_folder)
    each_sample_once(batches)
    assert equal(plain_folder, reference(batches))

    run("killed", killed)
    starts = lines(killed / "starts.jsonl")
    assert [start_line["resumed"] for start_line in starts] == [
        False,
        False,
        True,
        True,
    ]
    assert starts[2]["step"] in (2, 4), (
        "it resumes in the middle of the first epoch, which has 12 updates"
    )
    assert steps(killed) == batches
    assert equal(killed, dict(torch.load(plain_folder / "weights.pt")))


def test_a_dead_actor_is_named_as_a_lost_rank(tmp_path: Path) -> None:
    report = run("lost", tmp_path)
    assert report["error"].startswith("rank 1 (Ray actor with pid ")
    assert "was lost: its worker process has died" in report["error"]
    assert "max_failures" in report["error"]
    assert report["cause"] == "WorkerGroupError"


def test_one_worker_continues_the_sharded_run_of_two_when_a_machine_goes_away(
    tmp_path: Path,
) -> None:
    report = run("elastic", tmp_path)
    starts = lines(tmp_path / "starts.jsonl")
    assert [(start_line["size"], start_line["resumed"]) for start_line in starts] == [
        (2, False),
        (2, False),
        (1, True),
    ]
    resumed_step = starts[2]["step"]
    batches = steps(tmp_path)
    assert [len(ranks) for ranks in batches] == [2] * resumed_step + [1] * (
        len(batches) - resumed_step
    )
    assert (
        report["metrics"]["step"]
        == len(batches)
        == resumed_step + (2 * 96 - resumed_step * 8) // 4
    )
    each_sample_once(batches)
    weights = torch.load(tmp_path / "weights.pt")
    # FSDP adds the ranks' gradients in another order than DDP: rounding only
    expected = reference(batches)
    for name in expected:
        torch.testing.assert_close(weights[name], expected[name], rtol=1e-5, atol=1e-6)
