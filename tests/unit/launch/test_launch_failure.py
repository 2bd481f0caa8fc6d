"""Which rank is blamed, what is said about it, and the hints for known causes."""

from __future__ import annotations

import json
import signal
from itertools import permutations, product
from pathlib import Path

import pytest

from hasten import PREEMPTED_EXIT_CODE
from hasten.errors import CheckpointError
from hasten.launch.failure import (
    Failure,
    end_words,
    first_failure,
    hint_for,
    read_failure,
    render_failure,
)
from hasten.launch.worker import write_error

GLOO_LOST = "RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.2]:12962."


def failure_of(
    rank: int,
    summary: str = "ValueError: boom",
    *,
    code: int = 1,
    time: float = 0.0,
    stopped: bool = False,
) -> Failure:
    """A failure with a one-line traceback."""
    return Failure(
        rank,
        "host-a",
        code,
        time,
        pid=7,
        summary=summary,
        traceback=f"Traceback\n{summary}\n",
        stopped=stopped,
    )


def test_the_cause_is_found_whatever_the_order() -> None:
    cause = failure_of(2, time=5.0)
    consequences = [
        failure_of(0, GLOO_LOST, time=1.0),
        failure_of(1, "", code=-15, stopped=True, time=0.5),
        failure_of(3, time=6.0),
    ]
    for order in permutations([cause, *consequences]):
        assert first_failure(order) == cause


def test_what_all_ranks_raise_together_is_the_failure_of_the_rank_that_had_an_error_of_its_own(
    tmp_path: Path,
) -> None:
    """The rank that only agreed may well be the first to write its error down."""

    def agreeing(rank: int, cause: Exception | None, code: int) -> Failure:
        error = CheckpointError(
            "checking 'state': rank 1 raised ValueError: on purpose"
        )
        error.agreed, error.__cause__ = True, cause
        write_error(path := tmp_path / f"{rank}.json", error, None)
        return read_failure(rank, "host-a", code, 7, error_file=str(path), time=0.0)

    for order, code in product(
        permutations(range(3)), (1, -signal.SIGTERM)
    ):  # the launcher stops it before it has ended
        failures = {
            rank: agreeing(
                rank, *((ValueError("on purpose"), code) if rank == 1 else (None, 1))
            )
            for rank in order
        }
        assert first_failure(failures.values()) == failures[1]
        assert (failures[1].code, failures[1].stopped) == (1, False)


def test_a_traceback_is_printed_once_and_last() -> None:
    text = render_failure(
        [
            failure_of(1, code=3),
            failure_of(0, "", code=-15, stopped=True),
            failure_of(2, GLOO_LOST),
        ]
    )
    assert text.splitlines()[0] == "rank 1 on host-a (pid 7) failed first: exit code 3"
    assert "rank 0: stopped by the launcher" in text
    assert text.count("Traceback") == 1
    assert text.splitlines()[-1] == "ValueError: boom"


def test_debug_prints_the_others_before_it() -> None:
    text = render_failure([failure_of(1), failure_of(2, GLOO_LOST)], is_full=True)
    assert text.count("Traceback") == 2
    assert text.splitlines()[-1] == "ValueError: boom"


def test_equal_ends_share_a_line() -> None:
    ranks = [
        failure_of(9),
        *(failure_of(r, "", code=-15, stopped=True) for r in (0, 1, 2, 4)),
    ]
    assert "  ranks 0-2, 4: stopped by the launcher" in render_failure(ranks)


def test_a_lost_machine_is_named_first() -> None:
    text = render_failure(
        [failure_of(0, GLOO_LOST)], lost_machines=["machine 1 (host-b)"]
    )
    assert text.startswith("machine 1 (host-b) no longer responds")


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        ("The server socket has failed to listen on any local network address. port: 29500, EADDRINUSE", "--main_process_port"),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB", "lower the batch size"),
        ("RuntimeError: CUDA driver version is insufficient for CUDA runtime version", "install the torch build"),
        ("RuntimeError: CUDA error: no kernel image is available for execution on the device", "do not match"),
        ("ModuleNotFoundError: No module named 'flash_attn'", "a module is missing on this machine: install it there (host-a)"),
        ("[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=3)", "The stall report above"),
        ("RuntimeError: [gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1800000ms for recv operation", "The stall report above"),
        ("torch.distributed.DistBackendError: NCCL error in: x.cpp, ncclSystemError", "NCCL_DEBUG=WARN"),
        (GLOO_LOST, "ended first"),
        ("socket.gaierror: [Errno -2] Name or service not known", "--main_process_ip as a number"),
        ("RuntimeError: unable to open shared memory object </torch_1> in read-write mode", "--shm-size"),
        ("OSError: [Errno 24] Too many open files", "ulimit -n"),
    ],
)  # fmt: skip
def test_known_causes_get_a_hint(words: str, hint: str) -> None:
    assert hint in (hint_for(failure_of(0, words)) or "")


def test_signals_are_named() -> None:
    assert end_words(-signal.SIGKILL) == "killed by SIGKILL"
    assert end_words(-signal.SIGSEGV) == "signal SIGSEGV"
    assert end_words(2) == "exit code 2"
    assert end_words(-200) == "signal 200"
    killed = Failure(0, "host-a", -signal.SIGKILL, 0.0)
    assert "out-of-memory killer" in (hint_for(killed) or "")
    assert killed.exit_code == 137
    assert hint_for(failure_of(0)) is None


def test_a_preempted_run_is_told_apart_from_a_failure() -> None:
    preempted = Failure(
        0, "h", PREEMPTED_EXIT_CODE, 0.0, pid=1, summary="", traceback=""
    )
    assert "saved a checkpoint and stopped" in (hint_for(preempted) or "")


def test_a_name_that_is_not_in_a_module_is_no_missing_module() -> None:
    assert (
        hint_for(
            failure_of(
                0, "ImportError: cannot import name 'Modle' from 'mine' (/code/mine.py)"
            )
        )
        is None
    )


def test_hints_name_only_commands_that_exist() -> None:
    assert "hasten plan" not in (
        hint_for(failure_of(0, "torch.OutOfMemoryError: CUDA out of memory")) or ""
    )


def test_what_a_rank_wrote_is_read_in_both_forms(tmp_path: Path) -> None:
    hasten_file, torch_file, broken_file = (
        tmp_path / "a",
        tmp_path / "b",
        tmp_path / "c",
    )
    hasten_file.write_text(
        json.dumps(
            {"message": {}, "hasten": {"time": 3.0, "traceback": "T", "summary": "S"}}
        )
    )
    extra = {"py_callstack": "T2", "timestamp": "4"}
    torch_file.write_text(
        json.dumps({"message": {"message": "S2", "extraInfo": extra}})
    )
    broken_file.write_text('{"mess')
    read = [
        read_failure(0, "h", 1, 9, error_file=str(p), time=1.0)
        for p in (hasten_file, torch_file, broken_file, tmp_path / "none")
    ]
    assert [(f.summary, f.traceback, f.time) for f in read] == [
        ("S", "T", 3.0),
        ("S2", "T2", 4.0),
        ("", "", 1.0),
        ("", "", 1.0),
    ]
    assert Failure.decode(read[0].encode()) == read[0]
