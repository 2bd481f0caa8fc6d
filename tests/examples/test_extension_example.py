"""The example of an extension, from its wheel: everything it offers, used from the command line."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import pytest

EXAMPLE: Final = Path(__file__).parents[2] / "examples" / "extension"
SCRIPT: Final = """
import torch
from hasten import Accelerator

accelerator = Accelerator(log_with="csv", project_dir="out")
accelerator.init_trackers("demo")
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.utils.data.DataLoader(torch.ones(12, 4), batch_size=4)
model, optimizer, loader = accelerator.prepare(model, optimizer, data)
for batch in loader:
    loss = model(batch).square().mean()
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    accelerator.log({"loss": loss})
    if accelerator.preempted:
        print("stopped")
        break
accelerator.end_training()
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which the example's wheel was installed."""
    folder = tmp_path_factory.mktemp("extension")
    shutil.copytree(EXAMPLE, folder / "source")
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    built = [
        *pip,
        "wheel",
        "--no-deps",
        "--no-index",
        "--no-build-isolation",
        "-w",
        "wheels",
        "./source",
    ]
    subprocess.run(built, cwd=folder, check=True)
    wheel = next((folder / "wheels").glob("*.whl"))
    subprocess.run(
        [*pip, "install", "--no-deps", "--no-index", "--target", "site", str(wheel)],
        cwd=folder,
        check=True,
    )
    return folder / "site"


def launch(
    site: Path, folder: Path, *words: str, env: Mapping[str, str] | None = None
) -> str:
    """Run `hasten launch` in `folder` with the extension installed; return what it prints."""
    (folder / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "hasten", "launch", *words]
    environment = {**os.environ, **(env or {}), "PYTHONPATH": str(site)}
    finished = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return finished.stdout + finished.stderr


def test_the_launch_target_prints_a_job_file(site: Path, tmp_path: Path) -> None:
    printed = launch(
        site, tmp_path, "--submit=queue", "--num_processes=2", "train.py", "--epochs=3"
    )
    assert (
        "#QUEUE processes=2\nexec hasten launch --num_processes=2 train.py --epochs=3\n"
        in printed
    )


def test_a_run_has_the_tracker_and_the_strategy(site: Path, tmp_path: Path) -> None:
    printed = launch(site, tmp_path, "--cpu", "--strategy=counted", "train.py")
    assert "rank 0 holds 5 parameters" in printed
    lines = (tmp_path / "out" / "demo.csv").read_text().splitlines()
    assert [line.split(",")[:2] for line in lines] == [
        [str(step), "loss"] for step in (1, 2, 3)
    ]


def test_a_part_of_the_run_stops_it_when_a_file_appears(
    site: Path, tmp_path: Path
) -> None:
    stop = tmp_path / "stop"
    assert "stopped" not in launch(
        site, tmp_path, "--cpu", "train.py", env={"STOP_FILE": str(stop)}
    )
    stop.touch()
    assert "stopped" in launch(
        site, tmp_path, "--cpu", "train.py", env={"STOP_FILE": str(stop)}
    )
    lines = (tmp_path / "out" / "demo.csv").read_text().splitlines()
    assert len(lines) == 3 + 1
