"""Displays of progress: a bar in a terminal, an updated cell in a notebook, plain lines in a file."""

from __future__ import annotations

import html
import sys
import time
from typing import Any, Protocol

from rich.console import Console
from rich.live import Live
from rich.text import Text

from hasten.optional import available, need
from hasten.progress import text
from hasten.progress.meter import MeterReading

_WIDTH = 16  # characters of a full bar
_MAX_BARS = 30  # of one notebook cell


class Display(Protocol):
    """Output of readings, drawn every `every_s` seconds; `in_place` displays replace their previous output."""

    every_s: float
    next_draw_s: float
    """Time of the next draw on the clock of `time.perf_counter`, set by the bar that draws."""
    in_place: bool

    def draw(self, reading: MeterReading) -> None: ...
    def note(self, line: str) -> None: ...
    def close(self, reading: MeterReading) -> None: ...


class TerminalDisplay:
    """Bar that is redrawn in place; output of the program appears above it."""

    in_place = True

    def __init__(self, console: Console, every_s: float = 0.5) -> None:
        self.every_s = every_s
        self.next_draw_s = 0.0
        self._console = console
        self._live: Live | None = None

    def draw(self, reading: MeterReading) -> None:
        """Redraw the bar, and create it the first time."""
        if self._live is None:
            self._live = Live(console=self._console, auto_refresh=False)
            self._live.start()
        self._live.update(
            render_bar(reading, self._console.options.ascii_only), refresh=True
        )

    def note(self, line: str) -> None:
        """Print a line above the bar."""
        self._console.print(Text(line))

    def close(self, reading: MeterReading) -> None:
        """Draw the last state and restore the terminal."""
        self.draw(reading)
        if self._live is not None:
            self._live.stop()
            self._live = None


def render_bar(reading: MeterReading, ascii_only: bool = False) -> Text:
    """Return the bar of a terminal with the hint under it: one text, which rich draws three times faster than a table."""
    bar_mark = "-" if ascii_only else "━"
    if reading.total is None:
        num_filled = _WIDTH
    else:
        num_filled = min(_WIDTH * reading.step // max(reading.total, 1), _WIDTH)
    description = f"{reading.desc} " if reading.desc else ""
    bar_text = Text.assemble(
        (description, "bold"),
        (bar_mark * num_filled, "bar.complete"),
        (bar_mark * (_WIDTH - num_filled), "bar.back"),
        (f" {text.step_count(reading)} ", "cyan"),
        " · ".join(text.line_fields(reading)),
    )
    if reading.hint:
        bar_text.append(f"\n{reading.hint}", "yellow")
    return bar_text


class LineDisplay:
    """Lines of plain text for log files, at most one every `every_s` seconds for all bars that share this display."""

    in_place = False

    def __init__(self, console: Console, every_s: float = 10.0) -> None:
        self.every_s = every_s
        self.next_draw_s = time.perf_counter() + every_s
        self._console = console
        self._is_empty = True

    def draw(self, reading: MeterReading) -> None:
        """Write one line."""
        self._is_empty = False
        self.note(text.progress_line(reading))

    def note(self, line: str) -> None:
        """Write this line."""
        self._console.file.write(line + "\n")
        self._console.file.flush()

    def close(self, reading: MeterReading) -> None:
        """Write the last line, unless another line was written less than `every_s` seconds ago."""
        now_s = time.perf_counter()
        if self._is_empty or reading.hint or now_s >= self.next_draw_s:
            self.next_draw_s = now_s + self.every_s
            self.draw(reading)


class NotebookOutput:
    """One output of a notebook cell with a line for each bar of the cell; plain text if the front end shows no HTML."""

    def __init__(self) -> None:
        self._readings: dict[int, MeterReading] = {}
        self._handle: Any = None  # Any: IPython is an optional package
        self._cell: int | None = None

    def show(self, bar_text: int, reading: MeterReading) -> None:
        """Show or update the line of this bar; a new cell gets a new output."""
        shell = need("IPython").get_ipython()
        cell_number = None if shell is None else shell.execution_count
        if cell_number != self._cell:
            self._readings.clear()
            self._handle = None
            self._cell = cell_number
        self._readings[bar_text] = reading
        if len(self._readings) > _MAX_BARS:
            del self._readings[next(iter(self._readings))]
        readings = self._readings.values()
        content = {
            "text/plain": "\n".join(map(text.progress_line, readings)),
            "text/html": "<br>".join(map(_render_html, readings)),
        }
        if self._handle is None:
            self._handle = need("IPython.display").display(
                content, raw=True, display_id=True
            )
        else:
            self._handle.update(content, raw=True)


class NotebookDisplay:
    """Line of one bar in the output of a notebook cell, updated in place."""

    in_place = True

    def __init__(self, output: NotebookOutput, every_s: float = 0.5) -> None:
        self.every_s = every_s
        self.next_draw_s = 0.0
        self._output = output

    def draw(self, reading: MeterReading) -> None:
        """Show or update the line."""
        self._output.show(id(self), reading)

    def note(self, line: str) -> None:
        """Show a line as a separate output."""
        need("IPython.display").display({"text/plain": line}, raw=True)

    def close(self, reading: MeterReading) -> None:
        """Show the last state."""
        self.draw(reading)


def _render_html(reading: MeterReading) -> str:
    if reading.total is None:
        bar_text = ""
    else:
        bar_text = f'<progress value="{reading.step}" max="{max(reading.total, 1)}"></progress>'
    hint = f"<br><b>{html.escape(reading.hint)}</b>" if reading.hint else ""
    details = html.escape(" · ".join(text.line_fields(reading)))
    return f"<code>{html.escape(reading.desc)} {bar_text} {html.escape(text.step_count(reading))} {details}{hint}</code>"


class NoDisplay:
    """Display without output, for all processes but the main one."""

    every_s = next_draw_s = float("inf")
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


class DisplayMaker:
    """Factory of displays that fit the output of one console; their bars share a notebook's output, or a log file's lines."""

    def __init__(
        self, console: Console, *, is_main: bool = True, every_s: float | None = None
    ) -> None:
        self._console = console
        self._interval = {} if every_s is None else {"every_s": every_s}
        self._shared: NoDisplay | LineDisplay | None = None
        self._notebook: NotebookOutput | None = None
        if not is_main:
            self._shared = NoDisplay()
        elif console.is_jupyter and available("IPython"):
            self._notebook = NotebookOutput()
        elif not console.is_terminal:
            self._shared = LineDisplay(console, **self._interval)

    def __call__(self) -> Display:
        """Return the display of a new bar."""
        if self._notebook is not None:
            return NotebookDisplay(self._notebook, **self._interval)
        if self._shared is None:
            return TerminalDisplay(self._console, **self._interval)
        return self._shared
