"""Scripts written as well-known tutorials have them run as they are and print what they print on the original package.

The Hub is a fabricated cache; what the original printed lies in golden/tutorials, recorded by `make parity` (record.py).
"""

from __future__ import annotations

import subprocess
import sys
from importlib import util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

TESTS_FOLDER = Path(__file__).parent
LONG = (
    ("accumulation", 1),
    ("accumulation", 2),
    ("course_mrpc_plain", 1),
    ("course_trainer", 1),
    ("notebook_vision", 1),
)
FROM_HUB = ("course_mrpc", "course_mrpc_plain", "course_trainer", "notebook_vision")


def jobs() -> list[tuple[str, int]]:
    """Every script with every number of processes there is a record for."""
    stems = (
        path.stem.rpartition("_")
        for path in sorted((TESTS_FOLDER / "golden" / "tutorials").iterdir())
    )
    return [(name, int(processes)) for name, _, processes in stems]


def test_every_tutorial_is_recorded() -> None:
    scripts = {path.stem for path in (TESTS_FOLDER / "tutorials").glob("*.py")} - {
        "make_hub"
    }
    assert {name for name, _ in jobs()} == scripts


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("name", "processes"),
    [
        pytest.param(*job, marks=pytest.mark.exhaustive if job in LONG else ())
        for job in jobs()
    ],
)
def test_prints_what_it_prints_on_the_original(
    tmp_path: Path, warm: Any, parity: ModuleType, name: str, processes: int
) -> None:
    if name in FROM_HUB and not (
        util.find_spec("transformers") and util.find_spec("evaluate")
    ):
        pytest.skip("needs transformers and evaluate (pip install 'hasten[clients]')")
    env = (
        {"PYTHONPATH": str(TESTS_FOLDER / "tutorials" / "stand_ins")}
        if name == "notebook_vision"
        else {}
    )
    done = warm.run(
        tmp_path, [str(TESTS_FOLDER / "tutorials" / f"{name}.py")], processes, env
    )
    assert not done.failed, done.err
    recorded = (
        TESTS_FOLDER / "golden" / "tutorials" / f"{name}_{processes}.txt"
    ).read_text()
    assert (
        parity.text_differences(recorded, done.out[0], parity.recorded_tolerance())
        == []
    )
    assert done.out[1:] == [""] * (processes - 1)


@pytest.mark.exhaustive
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["accumulation", "course_mrpc"])
def test_the_launcher_starts_a_tutorial_on_two_processes(
    tmp_path: Path, offline: dict[str, str], warm: Any, parity: ModuleType, name: str
) -> None:
    """Nothing is warm here but the Hub cache: torch's launcher and the script as a user starts them.

    What it prints is compared with the same record as above, so that the exhaustive tests alone run `accumulation` there on two ranks.
    """
    if name in FROM_HUB:
        pytest.importorskip("evaluate")
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2"]
    done = subprocess.run(
        [*launch, str(TESTS_FOLDER / "tutorials" / f"{name}.py")],
        cwd=tmp_path,
        env=offline,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    recorded = (TESTS_FOLDER / "golden" / "tutorials" / f"{name}_2.txt").read_text()
    assert (
        parity.text_differences(recorded, done.stdout, parity.recorded_tolerance())
        == []
    )
