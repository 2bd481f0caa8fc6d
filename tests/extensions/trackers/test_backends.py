"""Every backend for real: its package writes in a process of its own, and its own reader finds the curve again.

What is not installed is skipped; `docs/tracking.md` says what was tried with which version.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from hasten import Accelerator
from hasten.errors import MissingPackageError
from hasten.optional import available
from hasten.tracking.registry import tracker_class, tracker_names

PROBE: Final = Path(__file__).with_name("backend_probe.py")
# after a resume at step 2, steps 3 and 4 were logged twice: these hide the old ones, the others keep both
HIDES_REPEATED: Final = ("jsonl", "tensorboard")
NOT_RESUMED: Final = ("clearml",)  # an offline session cannot be opened again


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name, marks=() if name in HIDES_REPEATED else pytest.mark.exhaustive
        )
        for name in tracker_names()
    ],
)
def test_a_resumed_run_is_read_back_as_one_curve(name: str, tmp_path: Path) -> None:
    package = tracker_class(name).package
    if package and not available(package):
        pytest.skip(f"the package {package} is not installed")
    private = {
        "HOME": str(tmp_path / "home"),
        "TRACKIO_DIR": str(tmp_path / "trackio"),
        "CLEARML_CACHE_DIR": str(tmp_path / "clearml"),
        "MLFLOW_ALLOW_FILE_STORE": "true",
        "WANDB_SILENT": "true",
    }
    if not available("alembic"):  # mlflow-skinny has no database
        private["MLFLOW_TRACKING_URI"] = (tmp_path / "mlruns").as_uri()
    (tmp_path / "home").mkdir()
    done = subprocess.run(
        [sys.executable, str(PROBE), name, str(tmp_path)],
        env={**os.environ, **private},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(
        [line for line in done.stdout.splitlines() if line.startswith("{")][-1]
    )
    curve = [(step, round(value, 4)) for step, value in report["curve"]]
    loss = {step: round(1.0 / (step + 1), 4) for step in range(8)}
    if name in NOT_RESUMED:
        assert curve == [(step, loss[step]) for step in range(5)]
        return
    assert report["ids"][0] == report["ids"][1]
    assert report["step"] == 7
    assert dict(curve) == loss
    if name in HIDES_REPEATED:
        assert [step for step, _ in curve] == list(range(8))


@pytest.mark.skipif(
    not available("mlflow") or available("alembic"),
    reason="mlflow is missing, or has its database",
)
def test_mlflow_without_a_place_for_its_records_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    accelerator = Accelerator(cpu=True, project_dir=str(tmp_path), log_with="mlflow")
    accelerator.init_trackers("project")
    with pytest.raises(MissingPackageError, match="alembic"):
        accelerator.log({"loss": 1.0})
