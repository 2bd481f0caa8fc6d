"""Displays of progress: a bar in a terminal, an updated cell in a notebook, plain lines in a file."""

from __future__ import annotations

import html
import sys
from typing import Any, Protocol

from rich.console import Console
from rich.live import Live
from rich.text import Text

from hasten.optional import available, need
from hasten.progress import text
from hasten.progress.meter import MeterReading

_WIDTH = 16  # characters of a full bar


class Display(Protocol):
    """Output of readings, drawn every `every_s` seconds; `in_place` displays replace their previous output."""

    every_s: float
    in_place: bool

    def draw(self, reading: MeterReading) -> None: ...
    def note(self, line: str) -> None: ...
    def close(self, reading: MeterReading) -> None: ...


class TerminalDisplay:
    """Bar that is redrawn in place; output of the program appears above it."""

    in_place = True

    def __init__(self, console: Console, every_s: float = 0.5) -> None:
        self.every_s = every_s
        self._console = console
        self._live: Live | None = None

    def draw(self, reading: MeterReading) -> None:
        """Redraw the bar, and create it the first time."""
        if self._live is None:
            self._live = Live(console=self._console, auto_refresh=False)
            self._live.start()
        self._live.update(rendered(reading, self._console.options.ascii_only), refresh=True)

    def note(self, line: str) -> None:
        """Print a line above the bar."""
        self._console.print(Text(line))

    def close(self, reading: MeterReading) -> None:
        """Draw the last state and restore the terminal."""
        self.draw(reading)
        if self._live is not None:
            self._live.stop()
            self._live = None


def rendered(reading: MeterReading, ascii_only: bool = False) -> Text:
    """Return the bar of a terminal with the hint under it: one text, which rich draws three times faster than a table."""
    mark = "-" if ascii_only else "━"
    done = _WIDTH if reading.total is None else min(_WIDTH * reading.step // max(reading.total, 1), _WIDTH)
    bar = Text.assemble(
        (f"{reading.desc} " if reading.desc else "", "bold"),
        (mark * done, "bar.complete"),
        (mark * (_WIDTH - done), "bar.back"),
        (f" {text.count(reading)} ", "cyan"),
        " · ".join(text.parts(reading)),
    )
    return bar.append(f"\n{reading.hint}", "yellow") if reading.hint else bar


class LineDisplay:
    """Periodic lines of plain text, for log files."""

    in_place = False

    def __init__(self, console: Console, every_s: float = 10.0) -> None:
        self.every_s = every_s
        self._console = console

    def draw(self, reading: MeterReading) -> None:
        """Write one line."""
        self.note(text.line(reading))

    def note(self, line: str) -> None:
        """Write this line."""
        self._console.file.write(line + "\n")
        self._console.file.flush()

    def close(self, reading: MeterReading) -> None:
        """Write the last line."""
        self.draw(reading)


class NotebookDisplay:
    """Output of a notebook cell that is updated in place; plain text if the front end shows no HTML."""

    in_place = True

    def __init__(self, every_s: float = 0.5) -> None:
        self.every_s = every_s
        self._handle: Any = None  # Any: IPython is an optional package

    def draw(self, reading: MeterReading) -> None:
        """Show or update the output."""
        content = {"text/plain": text.line(reading), "text/html": _markup(reading)}
        if self._handle is None:
            self._handle = need("IPython.display").display(content, raw=True, display_id=True)
        else:
            self._handle.update(content, raw=True)

    def note(self, line: str) -> None:
        """Show a line as a separate output."""
        need("IPython.display").display({"text/plain": line}, raw=True)

    def close(self, reading: MeterReading) -> None:
        """Show the last state."""
        self.draw(reading)


def _markup(reading: MeterReading) -> str:
    bar = "" if reading.total is None else f'<progress value="{reading.step}" max="{max(reading.total, 1)}"></progress>'
    hint = f"<br><b>{html.escape(reading.hint)}</b>" if reading.hint else ""
    details = html.escape(" · ".join(text.parts(reading)))
    return f"<code>{html.escape(reading.desc)} {bar} {html.escape(text.count(reading))} {details}{hint}</code>"


class NoDisplay:
    """Display without output, for all processes but the main one."""

    every_s = float("inf")
    in_place = True

    def draw(self, reading: MeterReading) -> None:
        """Do nothing."""

    def note(self, line: str) -> None:
        """Do nothing."""

    def close(self, reading: MeterReading) -> None:
        """Do nothing."""


def error_console() -> Console:
    """Return a console on stderr that is a terminal only if stderr is one.

    rich also takes FORCE_COLOR, which notebooks set in their child processes, as the sign of a terminal; a bar would fill their
    output with cursor movement codes.
    """
    return Console(stderr=True, force_terminal=sys.stderr.isatty())


def choose_display(console: Console, *, is_main: bool = True, every_s: float | None = None) -> Display:
    """Return the display that fits the output of `console`."""
    given = {} if every_s is None else {"every_s": every_s}
    if not is_main:
        return NoDisplay()
    if console.is_jupyter and available("IPython"):
        return NotebookDisplay(**given)
    if console.is_terminal:
        return TerminalDisplay(console, **given)
    return LineDisplay(console, **given)
