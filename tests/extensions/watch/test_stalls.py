"""A catalogue of ways to hang: each ends within seconds, and the reported cause, rank and line are the real ones.

Ranks are real processes under `hasten launch`, forked from one that has loaded torch already.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest
from torch.distributed import TCPStore

from hasten.cli.main import main
from hasten.extensions.watch import observe as ending
from hasten.launch import failure

pytestmark = pytest.mark.timed

WATCH_TESTS: Final = Path(__file__).parent
SUPPORT: Final = Path(__file__).parents[2] / "support"
SCRIPT: Final = WATCH_TESTS / "stall_cases.py"
AFTER_S: Final = 1.5
WITHIN_S: Final = 10.0


@dataclass(frozen=True)
class Case:
    """One way to go wrong, and what must be said about it."""

    name: str
    cause: str
    """A regular expression for the text."""
    marks: tuple[str, ...] = ()
    """Marks of lines in the script that must be named."""
    code: int = ending.STALLED
    quick: bool = False
    """In the ordinary suite; the others are run with `-m exhaustive`."""
    report_only: bool = False
    """A rank still works, so the job is not ended at once."""
    words: tuple[str, ...] = ()
    """Flags of its own."""


DIFFERENT_CALLS: Final = (
    r"waits at .* while rank \d waits at .*: the ranks called different collectives"
)
CASES: Final = (
    Case("gather_on_main", DIFFERENT_CALLS, ("gather", "backward"), quick=True),
    Case("barrier_on_main", DIFFERENT_CALLS, ("barrier", "reduce")),
    Case("save_on_main", DIFFERENT_CALLS, ("save", "backward"), quick=True),
    Case("load_on_main", DIFFERENT_CALLS, ("load", "barrier after load")),
    Case("object_on_main", DIFFERENT_CALLS, ("object", "barrier after object")),
    Case("uneven_loops", DIFFERENT_CALLS, ("backward", "barrier after loop"), quick=True),
    Case("other_order", DIFFERENT_CALLS, ("first gather", "first barrier")),
    Case("skipped_backward", DIFFERENT_CALLS, ("only backward", "barrier instead")),
    Case("collective_in_main_first", DIFFERENT_CALLS, ("main first", "gather in block"), quick=True),
    Case("late_gather", DIFFERENT_CALLS, ("late gather", "early barrier"), quick=True),
    Case("busy_elsewhere", r"rank 0 is busy with other collectives, now at", ("alone", "barrier of one"), report_only=True),
    Case("torch_reduce_on_main", DIFFERENT_CALLS, ("torch reduce", "barrier after torch")),
    Case("fsdp_forward_on_main", DIFFERENT_CALLS, ("forward", "barrier after forward"), quick=True),
    Case("other_shape", r"MismatchError", ("shapes",), code=1),
    Case("other_dtype", r"MismatchError", ("dtypes",), code=1),
    Case("other_structure", r"MismatchError", ("structures",), code=1),
    Case("error_in_forward", r"rank 1 .* failed first(.|\n)*ValueError: on purpose", ("fail",), code=1),
    Case("error_in_backward", r"rank 1 .* failed first(.|\n)*ValueError: on purpose", ("fail",), code=1),
    Case("error_in_save", r"rank 1 .* failed first(.|\n)*ValueError: on purpose", ("fail",), code=1),
    Case("error_in_load", r"rank 1 .* failed first(.|\n)*ValueError: on purpose", ("fail",), code=1),
    Case("error_in_worker", r"rank 1 .* failed first(.|\n)*ValueError: bad sample", ("sample fails",), code=1),
    Case("leaves", r"rank 1 .* exited first", ("gather alone",), code=1),
    Case("leaves_hard", r"rank 1 .* exited first", code=1),
    Case("crashes", r"rank 1 .* failed first: signal SIGSEGV", code=139),
    Case("killed", r"rank 1 .* failed first: killed by SIGKILL", code=137),
    Case("stopped", r"rank 1 is stopped \(SIGSTOP", ("backward",), quick=True),
    Case("main_stopped", r"rank 0 is stopped \(SIGSTOP", ("backward",)),
    Case("endless_loop", r"rank 1 is in user code at .* in endless_loop\(\), busy", ("loop",), report_only=True),
    Case("locked", r"rank 1 is in user code at .* in locked\(\), asleep", ("lock", "gather after lock"), report_only=True, quick=True),
    Case("asleep", r"rank 0 is in user code at .* in asleep\(\), asleep", ("sleep", "save after sleep"), report_only=True),
    Case("native", r"rank 1 \(pid \d+ on .*\) does not respond", ("backward",), report_only=True),
    Case("slow_disk", r"rank 1 is in a save or load at .* read and written nothing", ("slow save",), report_only=True),
    Case("stuck_sample", r"rank 1 is in the dataset's code", ("sample", "backward"), report_only=True),
    Case("never_started", r"rank 0 of 2 waits for rank 1 at tcp", code=1, words=("--process_group_init_timeout=7",)),
    Case("wrong_world_size", r"rank 1 was started with WORLD_SIZE=3 and rank 0 with WORLD_SIZE=2", code=1),
    Case("error_before_start", r"rank 1 .* failed first(.|\n)*ValueError: on purpose", ("before start",), code=1),
    Case("leaves_before_start", r"rank 1 .* exited first(.|\n)*PeerFailedError: rank 1 ended \(exit code 0\) before making an "
    r"Accelerator", code=1),
    Case("ends_early", r"rank 0 is in end_training\(\) at .* after 2 updates, while rank 1 waits at .* for one more: the ranks have unequal numbers of batches", ("early end", "backward"), quick=True),
    Case("edited_weight", r"different values: parameter '0.weight'(.|\n)*rank 0 and rank 1 differ(.|\n)*an in-place edit", code=1, quick=True),
    Case("unseeded_layer", r"different values: parameter '2.weight'(.|\n)*rank 0 and rank 1 differ", code=1),
    Case("own_rate", r"different values: .*param_groups\[0\]\['lr'\](.|\n)*rank 0: 0.1; rank 1: 1.1", code=1),
    Case("stuck_worker", r"rank 1 waits for its next batch", ("worker", "backward"), report_only=True),
)  # fmt: skip
HARMLESS: Final = ("long_first", "long_everywhere", "long_save", "slow_compile", "soak")


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The socket of a process that forks ranks."""
    # its native library keeps a pipe forever
    TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    path = str(tmp_path_factory.mktemp("warm") / "socket")
    server = subprocess.Popen(
        [sys.executable, str(SUPPORT / "rank_zygote.py"), "serve", path],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert server.stdout is not None
    assert server.stdout.readline() == "ready\n"
    yield path
    server.kill()
    server.wait()
    server.stdout.close()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HASTEN_HOME", str(tmp_path / "home"))
    (tmp_path / "train.py").write_text(SCRIPT.read_text())
    return tmp_path


def launch(warm: str, name: str, *words: str) -> int:
    rank = [
        sys.executable,
        "-S",
        str(SUPPORT / "rank_zygote.py"),
        "rank",
        warm,
        "train.py",
        name,
    ]
    return main(
        [
            "launch",
            "--cpu",
            "--num_processes=2",
            f"--trust_stall_after_s={AFTER_S}",
            *words,
            "--no_python",
            "--",
            *rank,
        ]
    )


def line_of(mark: str) -> str:
    lines = SCRIPT.read_text().splitlines()
    return f"train.py:{next(i for i, line in enumerate(lines, 1) if line.endswith(f'# at: {mark}'))}"


def named(text: str) -> str:
    """The text with tracebacks in the form of the report."""
    return re.sub(r'File "\S*?/?train.py", line (\d+)', r"train.py:\1", text)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            case, id=case.name, marks=() if case.quick else pytest.mark.exhaustive
        )
        for case in CASES
    ],
)
def test_reported_cause_is_the_cause(
    case: Case, warm: str, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = (
        ["--trust_stall=report", "--process_group_timeout=6"]
        if case.report_only
        else list(case.words)
    )
    start = time.monotonic()
    code = launch(warm, case.name, *words)
    took = time.monotonic() - start
    text = named("".join(capfd.readouterr()))
    assert re.search(case.cause, text), text
    for mark in case.marks:
        assert line_of(mark) in text, f"{mark}: {line_of(mark)} is not named in\n{text}"
    if case.report_only:
        assert code != 0
    else:
        assert code == case.code, text
        assert took < WITHIN_S
    if case.code == ending.STALLED:
        assert text.count("stalled: ") == (1 if case.report_only else 2), (
            text
        )  # the report once, and the launcher's line
        (report,) = (folder / "project").glob("stall-*.txt")
        assert re.search(case.cause, report.read_text())


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name == "long_first" else pytest.mark.exhaustive)
        for name in HARMLESS
    ],
)
def test_nothing_is_said_where_nothing_is_wrong(
    name: str, warm: str, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert launch(warm, name) == 0
    text = "".join(capfd.readouterr())
    assert "stalled" not in text
    assert "finished 0" in text
    assert "finished 1" in text


@pytest.mark.exhaustive
def test_a_rank_that_works_long_is_named_but_not_ended(
    warm: str, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert launch(warm, "long_on_one") == 0
    text = "".join(capfd.readouterr())
    assert f"rank 0 is in user code at {line_of('evaluation')}" in text
    assert "the ranks make progress again after" in text


def test_the_launcher_knows_the_exit_code() -> None:
    assert failure.STALLED == ending.STALLED
