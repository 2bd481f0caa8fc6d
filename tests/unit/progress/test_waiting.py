"""The line that is shown while one long operation runs: in a terminal only, and gone afterwards."""

from __future__ import annotations

import io
import threading
import time

import pytest

from hasten.progress.waiting import waiting_line


class Terminal(io.StringIO):
    """A stream that is a terminal."""

    def isatty(self) -> bool:
        return True


def wait_for(stream: io.StringIO, text: str) -> None:
    deadline = time.monotonic() + 60
    while text not in stream.getvalue():
        assert time.monotonic() < deadline, stream.getvalue()
        time.sleep(0.01)


def test_the_line_is_redrawn_and_erased() -> None:
    stream = Terminal()
    drawn: list[float] = []

    def text(seconds: float) -> str:
        drawn.append(seconds)
        return f"compiling, drawing {len(drawn)}"

    with waiting_line(text, stream, after_s=0.0, every_s=0.01):
        wait_for(stream, "drawing 3")
    shown = stream.getvalue()
    assert shown.startswith(
        "\n\r\x1b[2Kcompiling, drawing 1\r\x1b[2Kcompiling, drawing 2"
    )
    assert shown.endswith("\r\x1b[2K\x1b[1A"), (
        "a bar above it redraws itself on its own line"
    )
    assert drawn == sorted(drawn)


def test_the_line_is_erased_after_an_error() -> None:
    stream = Terminal()

    def fail() -> None:
        with waiting_line(lambda s: "compiling", stream, after_s=0.0, every_s=9.0):
            wait_for(stream, "compiling")
            raise ValueError("no code")

    with pytest.raises(ValueError, match="no code"):
        fail()
    assert stream.getvalue().endswith("\x1b[1A")
    assert not [
        thread
        for thread in threading.enumerate()
        if thread.name == "hasten-waiting-line"
    ]


@pytest.mark.parametrize("stream", [io.StringIO(), Terminal()])
def test_files_and_short_operations_show_nothing(stream: io.StringIO) -> None:
    after_s = 60.0 if stream.isatty() else 0.0
    with waiting_line(lambda s: "compiling", stream, after_s=after_s):
        pass
    assert stream.getvalue() == ""
