"""A law: no program that is healthy is ended by the watchdog, however odd it is. Reports are allowed, where they name what is seen.

The short form scales the watchdog's times down and runs some programs one after the other in one job. The long form runs each program
for longer than what by default leads to a report, under the default settings.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from hasten.cli.main import main

pytestmark = pytest.mark.timed

WATCH_TESTS = Path(__file__).parent
SUPPORT = Path(__file__).parents[2] / "support"
SCRIPT = WATCH_TESTS / "odd_cases.py"
AFTER_S = 1.5
HOLD_S, NOTE_S = "4", "1.2"
SHORT = (
    "native_sleep",
    "big_json",
    "stopped",
    "starved",
    "builds_in_forward",
    "no_descriptors",
)
PROGRAMS = (
    "native_sleep", "long_regex", "big_json", "big_pickle", "no_thread_switches", "stopped", "main_stopped", "starved", "swapping",
    "fork_storm", "no_descriptors", "other_time", "slow_data", "slow_worker", "slow_first", "uneven_evaluation", "slow_save_hook",
    "slow_file", "builds_in_forward", "first_compile", "inductor", "asks", "trains_in_a_thread", "slow_object",
)  # fmt: skip


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The socket of a process that forks ranks."""
    # its native library keeps a pipe forever
    TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    path = str(tmp_path_factory.mktemp("warm") / "socket")
    words = [sys.executable, str(SUPPORT / "rank_zygote.py"), "serve", path]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        assert server.stdout.readline() == "ready\n"
        yield path
        server.kill()


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HASTEN_HOME", str(tmp_path / "home"))
    (tmp_path / "train.py").write_text(SCRIPT.read_text())
    return tmp_path


def launch(warm: str, *words: str, size: int = 2, after_s: float | None = None) -> int:
    rank = [
        sys.executable,
        "-S",
        str(SUPPORT / "rank_zygote.py"),
        "rank",
        warm,
        "train.py",
        *words,
    ]
    settings = [] if after_s is None else [f"--trust_stall_after_s={after_s}"]
    return main(
        [
            "launch",
            "--cpu",
            f"--num_processes={size}",
            *settings,
            "--no_python",
            "--",
            *rank,
        ]
    )


def check(code: int, text: str, size: int = 2) -> None:
    """The job has run to its end on every rank."""
    assert code == 0, text
    assert sorted(re.findall(r"finished (\d)", text)) == [
        str(rank) for rank in range(size)
    ], text
    assert "the ranks called different collectives" not in text, text


def test_odd_programs_are_not_ended(
    warm: str, capfd: pytest.CaptureFixture[str]
) -> None:
    code = launch(warm, HOLD_S, NOTE_S, *SHORT, after_s=AFTER_S)
    text = "".join(capfd.readouterr())
    check(code, text)
    assert re.search(
        r"rank 1 \(pid \d+ on .*\) does not respond: native code that holds the GIL, or a failed machine",
        text,
    ), text
    assert "rank 1 is stopped" in text, text


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", PROGRAMS)
def test_odd_programs_are_not_ended_by_default(
    name: str,
    warm: str,
    capfd: pytest.CaptureFixture[str],
) -> None:
    code = launch(warm, "27", "8", name)
    check(code, "".join(capfd.readouterr()))


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", PROGRAMS)
def test_odd_programs_are_not_ended_within_short_times(
    name: str,
    warm: str,
    capfd: pytest.CaptureFixture[str],
) -> None:
    code = launch(warm, HOLD_S, NOTE_S, name, after_s=AFTER_S)
    check(code, "".join(capfd.readouterr()))


@pytest.mark.exhaustive
def test_a_rank_that_has_left_is_no_cause_where_nobody_needs_it(
    warm: str,
    capfd: pytest.CaptureFixture[str],
) -> None:
    code = launch(warm, "10", "8", "one_leaves", size=3)
    check(code, "".join(capfd.readouterr()), size=3)
