"""Rank-aware logging without a process group."""

from __future__ import annotations

import io
import logging
import subprocess
import sys

import pytest

from hasten.errors import CommError
from hasten.runtime import env
from hasten.runtime.logs import get_logger, show_logs


def as_rank(rank: int, world_size: int) -> None:
    rank_variables = {
        "RANK": rank,
        "WORLD_SIZE": world_size,
        "LOCAL_RANK": rank,
        "LOCAL_WORLD_SIZE": world_size,
    }
    env.replace_environment(
        {
            **env.snapshot(),
            **{name: str(value) for name, value in rank_variables.items()},
        }
    )


def test_main_only_by_default_and_every_rank_when_asked(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log = get_logger("test.logs.ranks", "INFO")
    for rank in range(3):
        with env.restored_environment():
            as_rank(rank, 3)
            log.info("to %s", "main")
            log.info("to %s", "all", main_process_only=False)
    assert caplog.messages == [
        "to main",
        "[RANK 0] to all",
        "[RANK 1] to all",
        "[RANK 2] to all",
    ]


def test_single_process_has_no_prefix_and_needs_no_order(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log = get_logger("test.logs.single", "INFO")
    log.info("one", main_process_only=False)
    log.info("two", main_process_only=False, in_order=True)
    assert caplog.messages == ["one", "two"]


def test_order_without_a_process_group_is_an_error() -> None:
    log = get_logger("test.logs.order", "INFO")
    with env.restored_environment():
        as_rank(1, 2)
        with pytest.raises(
            CommError,
            match=r"rank 1 of 2 before there is a process group.*create the Accelerator",
        ):
            log.info("x", main_process_only=False, in_order=True)
        log.info(
            "in_order means nothing where only the main process speaks", in_order=True
        )


def test_root_logger_is_never_touched() -> None:
    initial_root = logging.root.level, list(logging.root.handlers)
    get_logger("test.logs.root", "DEBUG").debug("x")
    get_logger("test.logs.root", logging.ERROR)
    assert (logging.root.level, list(logging.root.handlers)) == initial_root
    assert logging.getLogger("test.logs.root").level == logging.ERROR


def test_level_comes_from_the_environment_on_first_use() -> None:
    with env.restored_environment():
        env.replace_environment({**env.snapshot(), "HASTEN_LOG_LEVEL": "debug"})
        log = get_logger("test.logs.env")
        assert log.logger.level == logging.NOTSET, (
            "nothing is read when a module makes its logger"
        )
        log.debug("x")
        assert log.logger.level == logging.DEBUG
        assert (
            get_logger("test.logs.given", "ERROR").isEnabledFor(logging.WARNING)
            is False
        )


def test_once(caplog: pytest.LogCaptureFixture) -> None:
    log = get_logger("test.logs.once")
    for value in (1, 2, 1):
        log.warning_once("value %d", value)
        log.warning_once("plain")
    assert caplog.messages == ["value 1", "plain", "value 2"]
    get_logger("test.logs.once").warning_once("plain")
    assert caplog.messages[-1] == "plain", (
        "once for each logger object, with no state behind their backs"
    )


def test_records_name_the_callers_line(caplog: pytest.LogCaptureFixture) -> None:
    log = get_logger("test.logs.line", "INFO")
    log.info("x", extra={"mine": 1})
    log.warning_once("y")
    log.log(logging.INFO, "z", main_process_only=False)
    try:
        raise ValueError("v")
    except ValueError:
        log.exception("w")
    assert {record.funcName for record in caplog.records} == {
        "test_records_name_the_callers_line"
    }
    assert caplog.records[0].__dict__["mine"] == 1
    assert caplog.records[3].exc_info is not None


def test_wrong_environment_does_not_lose_log_lines(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log = get_logger("test.logs.wrong", "INFO")
    with env.restored_environment():
        env.replace_environment({**env.snapshot(), "RANK": "seven", "WORLD_SIZE": "2"})
        log.info("still here")
    assert caplog.messages == ["still here"]


def test_logs_need_no_torch() -> None:
    code = (
        "import sys; from hasten.runtime.logs import get_logger; get_logger('x').warning('w %d', 1);"
        "sys.exit('torch' in sys.modules)"
    )
    completed = subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, text=True
    )
    assert (completed.returncode, completed.stderr) == (0, "w 1\n")


def test_show_logs_can_be_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(logging.root, "handlers", [])
    monkeypatch.setattr(sys, "stderr", stream)
    undo = show_logs("DEBUG")
    logging.getLogger("hasten.somewhere").debug("seen")
    undo()
    logging.getLogger("hasten.somewhere").debug("unseen")
    assert "DEBUG hasten.somewhere: seen" in stream.getvalue()
    assert "unseen" not in stream.getvalue()
    assert not logging.getLogger("hasten").handlers
