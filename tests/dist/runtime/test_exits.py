"""Ranks may end at different times, without a barrier: none waits for a store that is gone, and what rank 0 has said can be read."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

pytestmark = pytest.mark.timed

CASES: Final = Path(__file__).with_name("exit_cases.py")
SOON_S: Final = 30.0
"""Far more than an exit takes, far less than the five minutes for which torch looks for a store."""


Exits = dict[str, dict[str, float]]
"""By "case/rank": the exit code, and when the script was over, what runs at exit had run, and the process had ended."""


def said_by(case: str, case_folder: Path) -> str:
    """What the ranks of a case have printed."""
    return "\n".join(
        path.read_text() for path in sorted(case_folder.glob(f"{case}.*.err"))
    )


@pytest.fixture(scope="module")
def case_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("exits")


@pytest.fixture(scope="module")
def exits(case_folder: Path) -> Exits:
    out = case_folder / "ends.json"
    env = {
        name: value
        for name, value in os.environ.items()
        if name != "TORCHELASTIC_USE_AGENT_STORE"
    }
    with subprocess.Popen(
        [sys.executable, str(CASES), str(out)], env=env, start_new_session=True
    ) as program:
        try:
            assert program.wait(100) == 0
        except subprocess.TimeoutExpired:
            os.killpg(program.pid, signal.SIGKILL)  # its ranks, too
            raise
    exits_by_case: Exits = json.loads(out.read_text())
    return exits_by_case


@pytest.mark.parametrize(
    ("case", "codes"),
    [
        ("first_0", (0, 0)),
        ("first_1", (0, 0)),
        ("gone_0", (0, 0)),
        ("fails_0", (1, 0)),
        ("killed_1", (0, -9)),
    ],
)
def test_ranks_end_soon_and_well(
    case: str, codes: tuple[int, int], exits: Exits, case_folder: Path
) -> None:
    for rank, expected_code in enumerate(codes):
        rank_exit = exits[f"{case}/{rank}"]
        assert rank_exit["code"] == expected_code, said_by(case, case_folder)
        assert rank_exit["ended"] - rank_exit["over"] < SOON_S


def test_rank_0_serves_the_store_until_the_others_have_left(exits: Exits) -> None:
    assert exits["first_0/0"]["left"] >= exits["first_0/1"]["over"]


def test_rank_0_waits_for_nobody_after_an_error(exits: Exits) -> None:
    assert exits["fails_0/0"]["left"] < exits["fails_0/1"]["over"]
