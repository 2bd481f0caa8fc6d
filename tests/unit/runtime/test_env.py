"""The environment: strict flags, defaults, and putting it back."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hasten.errors import ConfigError
from hasten.runtime import env


def test_defaults() -> None:
    variables = {"HOME": "/home/me"}
    assert env.debug(variables) is False
    assert env.home(variables) == Path("/home/me/.cache/hasten")
    assert env.log_level(variables) is None


def test_values() -> None:
    variables = {
        "HASTEN_CONFIG": "{}",
        "HASTEN_DEBUG": "1",
        "HASTEN_HOME": "/data/h",
        "HASTEN_LOG_LEVEL": "debug",
    }
    assert env.debug(variables) is True
    assert env.home(variables) == Path("/data/h")
    assert env.log_level(variables) == "DEBUG"
    assert env.home({"XDG_CACHE_HOME": "/cache"}) == Path("/cache/hasten")


@pytest.mark.parametrize("word", ["1", "true", "Yes", "ON", " y ", "t"])
def test_yes(word: str) -> None:
    assert env.read_flag({"X": word}, "X") is True


@pytest.mark.parametrize("word", ["0", "false", "No", "off", "", "n", "f"])
def test_no(word: str) -> None:
    assert env.read_flag({"X": word}, "X", default=True) is False


def test_flag_that_is_neither_is_an_error() -> None:
    with pytest.raises(
        ConfigError,
        match=r"HASTEN_DEBUG='maybe' is neither yes nor no.*set HASTEN_DEBUG to 1 or 0",
    ):
        env.debug({"HASTEN_DEBUG": "maybe"})
    assert env.read_flag({}, "X", default=True) is True


def test_the_familiar_debug_variable_is_honoured_unless_ours_is_set() -> None:
    assert env.debug({"ACCELERATE_DEBUG_MODE": "true"})
    assert not env.debug({"ACCELERATE_DEBUG_MODE": "true", "HASTEN_DEBUG": "0"})


def test_unknown_log_level_is_an_error() -> None:
    with pytest.raises(
        ConfigError, match=r"HASTEN_LOG_LEVEL='loud' is not a log level.*DEBUG, INFO"
    ):
        env.log_level({"HASTEN_LOG_LEVEL": "loud"})


def test_snapshot_is_read_only_and_does_not_follow() -> None:
    initial_snapshot = env.snapshot()
    with env.restored_environment():
        os.environ["HASTEN_TEST_VARIABLE"] = "1"
        assert "HASTEN_TEST_VARIABLE" not in initial_snapshot
        assert env.snapshot()["HASTEN_TEST_VARIABLE"] == "1"
        del os.environ["PATH"]
    assert env.snapshot() == initial_snapshot
    with pytest.raises(TypeError):
        initial_snapshot["X"] = "1"  # type: ignore[index]
