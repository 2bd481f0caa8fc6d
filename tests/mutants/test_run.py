"""The run of `make mutants` on a module of four lines: what its test checks is killed, what it does not check survives."""

from __future__ import annotations

import faulthandler
from pathlib import Path

import pytest

from tests.mutants.children import Job, run_jobs
from tests.mutants.mutate import mutants_of
from tests.mutants.rooms import Room
from tests.mutants.run import Equivalent, Outcome, judge_rooms, main, report

MODULE = """
def countdown(start):
    while start > 0:
        start -= 1
    return start


def is_even(number):
    return number % 2 == 0


def unused():
    return 1
"""
TEST = """
from toy_of_mutants import countdown, is_even

def test_countdown():
    assert countdown(3) == 0

def test_even():
    is_even(3)

def test_red():
    assert is_even(3)
"""


@pytest.fixture(autouse=True)
def _no_watchdog_thread() -> None:
    """Stop pytest's thread that watches the time, for which a forked child would wait forever."""
    faulthandler.cancel_dump_traceback_later()


def test_planted_mutants_are_killed_and_untested_ones_survive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = tmp_path / "toy_of_mutants.py"
    module.write_text(MODULE)
    test_file = tmp_path / "test_toy.py"
    test_file.write_text(TEST)
    monkeypatch.syspath_prepend(tmp_path)
    # a countdown that never ends is stopped by the limit
    monkeypatch.setattr("tests.mutants.run.START_TIMEOUT_S", 5.0)
    rooms = {"toy": Room({"toy_of_mutants": module}, (test_file,))}
    changes = {
        "start > 0 -> start >= 0": Outcome.KILLED,
        "start -= 1 -> start += 1": Outcome.TIMED_OUT,
        "return number % 2 == 0 -> return number % 2 != 0": Outcome.SURVIVED,
        "return number % 2 == 0 -> return number % 3 == 0": Outcome.EQUIVALENT,
        "return 1 -> return 2": Outcome.NOT_EXECUTED,
    }
    mutants = [mutant for mutant in mutants_of(module) if mutant.change in changes]
    equivalent = Equivalent(
        module.name,
        "is_even",
        "return number % 2 == 0 -> return number % 3 == 0",
        "not really",
    )
    score = judge_rooms(rooms, {"toy": mutants}, [equivalent], num_workers=2)
    outcomes = {verdict.mutant.change: verdict.outcome for verdict in score.verdicts}
    assert outcomes == changes
    assert score.share() == 0.5
    page = report(score, 7, "make mutants")
    assert "| toy_of_mutants.py | 5 | 2 | 1 | 1 | 2 |" in page
    assert f"- `toy_of_mutants.py:9 is_even: {equivalent.change}`: not really" in page
    printed = capsys.readouterr().out
    assert f"left out, fails without a mutant: {test_file}::test_red" in printed


def test_a_room_whose_tests_cannot_run_is_an_error(tmp_path: Path) -> None:
    def refuse(folder: Path) -> int:
        print("no such file")  # noqa: T201 - into the child's log
        return 4

    endings = list(run_jobs([Job("room", refuse, 20.0)], num_workers=1))
    assert [(ending.exit_code, ending.log) for ending in endings] == [
        (4, "no such file\n")
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--count", "0"], "'0' is no number of at least 1"),
        (["--workers", "two"], "'two' is no number of at least 1"),
        (["--share", "95"], "'95' is no number between 0 and 1"),
        (["--room", "kitchen"], "invalid choice: 'kitchen'"),
        (["--at", "config/resolve.py"], "'config/resolve.py' is not FILE:LINE"),
    ],
)
def test_bad_input_is_told(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert message in capsys.readouterr().err
