"""Scripts in the style of well-known tutorials run as they are, against a fabricated Hub cache."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent / "tutorials"
LAUNCH = ("-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2")


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("transformers")
    home = tmp_path_factory.mktemp("hub")
    done = subprocess.run(
        [sys.executable, str(HERE / "make_hub.py"), str(home)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return home


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("script", "launcher"),
    [
        ("course_mrpc.py", LAUNCH),
        ("course_trainer.py", LAUNCH),
        ("notebook_vision.py", ()),
        ("gan_and_checkpoints.py", LAUNCH),
    ],
)
def test_tutorial(tmp_path: Path, hub: Path, script: str, launcher: tuple[str, ...]) -> None:
    env = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(hub),
        "HASTEN_HOME": str(tmp_path),
    }
    done = subprocess.run(
        [sys.executable, *launcher, str(HERE / script)],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    assert "done" in done.stdout
