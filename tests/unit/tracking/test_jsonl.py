"""The tracker without dependencies: files a person can read, and a reader that tolerates a crash."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from hasten import Accelerator, read_metrics
from hasten.tracking.jsonl import JsonlTracker
from hasten.tracking.manager import TrackerManager
from hasten.tracking.values import as_pixels, encode_png

CRASH = """
import sys, torch
from pathlib import Path
from hasten.tracking.jsonl import JsonlTracker
from hasten.tracking.manager import TrackerManager
manager = TrackerManager([JsonlTracker()], directory=Path(sys.argv[1]), flush_every_s=1000.0)
manager.init("project")
for step in range(20):
    manager.log({"loss": torch.tensor(float(step))}, step=step)
raise RuntimeError("out of memory, perhaps")
"""


def run_folder(folder: Path) -> Path:
    return next((folder / "project").iterdir())


def test_infinite_values_survive_as_valid_json(tmp_path: Path) -> None:
    manager = TrackerManager([JsonlTracker()], directory=tmp_path)
    manager.init("project", {"lr": 0.1})
    for value in (math.nan, math.inf, -math.inf, 1.0):
        manager.log({"loss": value})
    manager.finish()
    text = (run_folder(tmp_path) / "metrics.jsonl").read_text()
    for line in text.splitlines():
        json.loads(line, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
    losses = [row["loss"] for row in read_metrics(run_folder(tmp_path))]
    assert math.isnan(losses[0])
    assert losses[1:] == [math.inf, -math.inf, 1.0]
    assert json.loads((run_folder(tmp_path) / "config.json").read_text()) == {"lr": 0.1}


def test_an_exception_in_training_loses_no_value(tmp_path: Path) -> None:
    completed = subprocess.run(
        [sys.executable, "-c", CRASH, str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert "out of memory, perhaps" in completed.stderr
    assert [row["loss"] for row in read_metrics(run_folder(tmp_path))] == [
        float(step) for step in range(20)
    ]
    assert (
        '{"finished":"failed"}' in (run_folder(tmp_path) / "metrics.jsonl").read_text()
    )


def test_a_torn_line_is_skipped_and_the_next_run_begins_on_its_own(
    tmp_path: Path,
) -> None:
    manager = TrackerManager([JsonlTracker()], directory=tmp_path)
    manager.init("project")
    manager.log({"loss": 0.0}, step=0)
    state = manager.state_dict()
    manager.finish()
    path = run_folder(tmp_path) / "metrics.jsonl"
    with path.open("a") as file:
        file.write('{"step": 1, "ti')
    manager = TrackerManager([JsonlTracker()], directory=tmp_path)
    manager.init("project")
    manager.load_state_dict(state)
    manager.log({"loss": 1.0})
    manager.finish()
    assert [(row["step"], row["loss"]) for row in read_metrics(path)] == [
        (0, 0.0),
        (1, 1.0),
    ]


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_png_files_are_read_by_others(channels: int, tmp_path: Path) -> None:
    image = np.random.default_rng(0).integers(0, 256, (7, 5, channels), dtype=np.uint8)
    (tmp_path / "a.png").write_bytes(encode_png(image))
    with Image.open(tmp_path / "a.png") as opened_image:
        assert np.array_equal(np.asarray(opened_image).reshape(image.shape), image)


def test_floats_become_bytes() -> None:
    [image] = as_pixels("a", np.array([[0.0, 0.5], [1.0, 2.0]]))
    assert image[..., 0].tolist() == [[0, 128], [255, 255]]


def test_values_without_a_step_are_numbered_by_updates(tmp_path: Path) -> None:
    """Also after a resume, and inside accumulation windows, where several calls have one number."""
    for _ in range(2):
        accelerator = Accelerator(
            cpu=True,
            project_dir=str(tmp_path),
            log_with="jsonl",
            gradient_accumulation_steps=2,
        )
        net = torch.nn.Linear(1, 1)
        model, optimizer = accelerator.prepare(
            net, torch.optim.SGD(net.parameters(), lr=0.1)
        )
        accelerator.init_trackers("project")
        accelerator.load_state(must_exist=False)
        for _ in range(4):
            with accelerator.accumulate(model):
                accelerator.backward(model(torch.ones(1, 1)).mean())
                optimizer.step()
                optimizer.zero_grad()
            accelerator.log({"loss": 1.0})
        accelerator.save_state()
        accelerator.end_training()
    assert [row["step"] for row in read_metrics(run_folder(tmp_path))] == [
        0,
        1,
        1,
        2,
        2,
        3,
        3,
        4,
    ]
