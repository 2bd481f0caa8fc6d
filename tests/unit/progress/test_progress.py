"""Progress: what is counted, what is shown where, and what it never does (wait, swallow, print elsewhere)."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from rich.console import Console
from torch.distributed import HashStore, PrefixStore
from torch.utils.data import DataLoader, TensorDataset

import hasten
from hasten.errors import ConfigError
from hasten.progress import text
from hasten.progress.bar import BarContext, Progress
from hasten.progress.display import (
    DisplayMaker,
    LineDisplay,
    NoDisplay,
    NotebookDisplay,
    NotebookOutput,
    TerminalDisplay,
)
from hasten.progress.meter import Meter, MeterReading
from hasten.progress.scalars import LateScalars, fetch_scalars
from hasten.progress.straggler import BackwardTimer, StragglerWatch, find_straggler
from hasten.runtime.topology import Topology


class RecordingDisplay:
    """A display that keeps every reading."""

    every_s = next_draw_s = 0.0
    in_place = True

    def __init__(self) -> None:
        self.readings: list[MeterReading] = []
        self.closed = 0

    def draw(self, reading: MeterReading) -> None:
        self.readings.append(reading)

    def note(self, line: str) -> None:
        """Not kept."""

    def close(self, reading: MeterReading) -> None:
        self.readings.append(reading)
        self.closed += 1


def batches(num: int, rows: int = 4) -> Iterator[dict[str, torch.Tensor]]:
    for _ in range(num):
        yield {
            "input_ids": torch.zeros(rows, 16, dtype=torch.long),
            "labels": torch.zeros(rows),
        }


def test_every_item_passes_through_and_is_counted() -> None:
    sheet = RecordingDisplay()
    bar = Progress(
        list(batches(5)), here=BarContext(display=sheet, replicas=2), desc="train"
    )
    assert len(bar) == 5
    for batch in bar:
        assert batch["labels"].shape == (4,)
        bar.show(loss=torch.tensor(0.5, requires_grad=True), phase="warm")
    last = sheet.readings[-1]
    assert (last.step, last.total, last.desc) == (5, 5, "train")
    assert last.values == {"loss": 0.5, "phase": "warm"}
    assert last.samples_per_s / last.steps_per_s == pytest.approx(8), (
        "4 rows on each of 2 replicas"
    )
    assert last.tokens_per_s / last.steps_per_s == pytest.approx(128)
    assert sheet.closed == 1


def test_a_stream_has_no_total_and_no_eta() -> None:
    sheet = RecordingDisplay()
    bar = Progress(batches(3), here=BarContext(display=sheet))
    assert sum(1 for _ in bar) == 3
    assert sheet.readings[-1].total is None
    assert sheet.readings[-1].eta_s is None
    with pytest.raises(TypeError, match="total="):
        len(bar)


def test_break_and_exceptions_close_the_bar_and_the_source() -> None:
    closed: list[bool] = []

    def source() -> Iterator[int]:
        try:
            yield from range(10)
        finally:
            closed.append(True)

    sheet = RecordingDisplay()
    for item in Progress(source(), here=BarContext(display=sheet)):
        if item == 2:
            break
    assert (closed, sheet.closed) == ([True], 1)
    with pytest.raises(RuntimeError, match="mine"):  # noqa: PT012  the loop is what is tested
        for _ in Progress(source(), here=BarContext(display=sheet)):
            raise RuntimeError("mine")
    assert (closed, sheet.closed) == ([True, True], 2)


def test_counting_by_hand() -> None:
    sheet = RecordingDisplay()
    with Progress[int](here=BarContext(display=sheet), total=10) as bar:
        bar.update(4, samples=8)
    assert (sheet.readings[-1].step, sheet.closed) == (4, 1)
    with pytest.raises(ConfigError, match="no iterable to iterate"):
        next(iter(bar))


def test_other_processes_show_nothing() -> None:
    sheet = RecordingDisplay()
    bar = Progress(range(3), here=BarContext(display=sheet, is_main=False))
    for _ in bar:
        bar.show(loss=1.0)
    assert sheet.readings == []
    assert isinstance(DisplayMaker(Console(), is_main=False)(), NoDisplay)


def test_a_file_gets_plain_lines() -> None:
    file = io.StringIO()
    display = DisplayMaker(Console(file=file), every_s=0.0)()
    assert isinstance(display, LineDisplay)
    bar = Progress(list(batches(2)), here=BarContext(display=display), desc="epoch 1")
    for _ in bar:
        bar.show(loss=0.25)
    lines = file.getvalue().splitlines()
    assert lines[0].startswith("epoch 1 1/2 50% | loss 0.25 | ")
    assert lines[-1].startswith("epoch 1 2/2 100% | loss 0.25 | ")
    assert "\x1b" not in file.getvalue()


def test_a_terminal_gets_one_bar_and_prints_stay_above() -> None:
    file = io.StringIO()
    console = Console(
        file=file,
        force_terminal=True,
        force_jupyter=False,
        width=120,
        _environ={"TERM": "xterm"},
    )
    display = DisplayMaker(console, every_s=0.0)()
    assert isinstance(display, TerminalDisplay)
    bar = Progress(list(batches(3)), here=BarContext(display=display), desc="train")
    for index, _ in enumerate(bar):
        console.print(f"note {index}", highlight=False)
        bar.show(loss=0.25)
    shown = file.getvalue()
    assert "note 2" in shown
    assert "3/3 100%" in shown
    assert "loss 0.25" in shown
    assert "\x1b[?25h" in shown, "the cursor is shown again"


def test_bars_nest_in_a_terminal() -> None:
    file = io.StringIO()
    console = Console(
        file=file,
        force_terminal=True,
        force_jupyter=False,
        width=120,
        _environ={"TERM": "xterm"},
    )
    outer = Progress(
        range(2), here=BarContext(display=TerminalDisplay(console, 0.0)), desc="epochs"
    )
    for _ in outer:
        inner = Progress(
            range(2),
            here=BarContext(display=TerminalDisplay(console, 0.0)),
            desc="steps",
        )
        for _ in inner:
            pass
    assert "epochs" in file.getvalue()
    assert "steps" in file.getvalue()


def test_a_notebook_cell_is_updated_in_place() -> None:
    published: list[tuple[dict[str, str], bool]] = []

    class Handle:
        def update(self, content: dict[str, str], raw: bool) -> None:
            published.append((content, True))

    output = NotebookOutput()
    output._handle = Handle()
    for number in range(2):
        bar = Progress(
            range(2),
            here=BarContext(display=NotebookDisplay(output, 0.0)),
            desc=f"<train> {number}",
        )
        for _ in bar:
            bar.show(loss=0.5)
    content = published[-1][0]
    lines = content["text/plain"].splitlines()
    assert [
        line.startswith(f"<train> {number} 2/2 100% | loss 0.5")
        for number, line in enumerate(lines)
    ] == [True] * 2
    assert '<progress value="2" max="2">' in content["text/html"]
    assert "&lt;train&gt;" in content["text/html"]


def test_rates_and_remaining_time_follow_the_window() -> None:
    meter = Meter(100, now_s=0.0)
    for second in range(1, 41):
        meter.step, meter.samples = second, 10 * second
        reading = meter.read(float(second))
    assert reading.steps_per_s == pytest.approx(1.0)
    assert reading.samples_per_s == pytest.approx(10.0)
    assert reading.eta_s == pytest.approx(60.0)
    # forty steps in one second: the window forgets the slow start soon, not at once
    meter.step = 80
    assert meter.read(41.0).steps_per_s > 2


@pytest.mark.parametrize(
    ("number", "shown"),
    [(0.5, "0.5"), (999, "999"), (1234, "1.23k"), (1234567, "1.23M"), (2.5e9, "2.5G")],
)
def test_short_numbers(number: float, shown: str) -> None:
    assert text.short_number(number) == shown


@pytest.mark.parametrize(
    ("seconds", "shown"), [(None, "?"), (5, "0:05"), (65, "1:05"), (3661, "1:01:01")]
)
def test_clock_times(seconds: float | None, shown: str) -> None:
    assert text.clock_time(seconds) == shown


def test_many_scalars_are_fetched_in_one_go_each_with_its_own_precision() -> None:
    tensors = [
        torch.tensor(0.1, dtype=torch.float64),
        torch.tensor(3),
        torch.tensor([0.5]),
        torch.tensor(1.0).bfloat16(),
    ]
    assert fetch_scalars(tensors) == [0.1, 3, 0.5, 1.0]
    assert fetch_scalars([]) == []


def test_late_scalars_show_the_newest_value() -> None:
    late_scalars = LateScalars()
    assert late_scalars.read() == {}
    late_scalars.store_values({"loss": torch.tensor(1.0), "note": "a"})
    late_scalars.store_values({"loss": torch.tensor(2.0)})
    assert late_scalars.read() == {"loss": 2.0, "note": "a"}


def test_the_straggler_is_the_one_clearly_slower_rank() -> None:
    assert find_straggler({0: 0.010}) is None
    assert find_straggler({0: 0.010, 1: 0.011, 2: 0.012}) is None
    assert find_straggler({0: 1e-5, 1: 9e-5}) is None, (
        "ten times slower, but by less than a millisecond"
    )
    straggler = find_straggler({0: 0.010, 1: 0.030, 2: 0.011})
    assert straggler is not None
    assert straggler.rank == 1
    assert "rank 1 is slower than the others: 30 ms" in str(straggler)


def test_pace_is_measured_up_to_the_first_backward_pass() -> None:
    fake_time = [0.0]
    pulse = BackwardTimer(torch.device("cpu"), clock=lambda: fake_time[0])
    for wait in (1.0, 3.0):
        pulse.start_timer()
        fake_time[0] += wait
        pulse.backward()
        fake_time[0] += 100.0  # the backward pass, where the others are waited for
        pulse.backward()
    assert pulse.take_mean() == 2.0
    assert pulse.take_mean() is None


def test_ranks_leave_notes_and_the_main_one_finds_the_slow() -> None:
    store, far = HashStore(), 1e12
    for rank, pace in ((2, 0.05), (1, 0.01), (0, 0.01)):
        fake_time = [0.0]
        pulse = BackwardTimer(
            torch.device("cpu"),
            clock=lambda fake_time=fake_time: fake_time[0],  # type: ignore[misc]
        )
        pulse.start_timer()
        fake_time[0] = pace
        pulse.backward()
        watch = StragglerWatch(store, rank, 3)
        watch.compare_when_due(far, pulse)
    assert watch.found is not None
    assert watch.found.rank == 2
    known_straggler = watch.found
    watch.compare_when_due(far, pulse)
    assert watch.found is known_straggler, "not again before its time"


def test_tqdm_is_silent_away_from_the_main_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # else its thread outlives us
    monkeypatch.setattr(pytest.importorskip("tqdm.auto").tqdm, "monitor_interval", 0)
    file = io.StringIO()
    assert list(
        hasten.tqdm(
            range(3),
            file=file,
            topology=Topology(rank=1, world_size=2, local_rank=1, local_world_size=2),
        )
    ) == [0, 1, 2]
    assert file.getvalue() == ""
    list(hasten.tqdm(range(3), file=file, topology=Topology()))
    assert "3/3" in file.getvalue()


def test_the_accelerators_bar_needs_no_annotation() -> None:
    """Both forms pass the strict type checker as they are written here, and count."""
    accelerator = hasten.Accelerator(cpu=True)
    by_hand = accelerator.progress(total=2, console=Console(file=io.StringIO()))
    by_hand.update()
    assert len(by_hand) == 2
    for number in accelerator.progress([1.5, 2.5], console=Console(file=io.StringIO())):
        assert number.is_integer() is False  # a float, to the checker too


def test_the_bars_of_an_accelerator_share_one_console(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Inside each other they are drawn as one picture; each on a console of its own, they would overwrite each other."""
    consoles: list[Console] = []

    class RecordingMaker(DisplayMaker):
        def __call__(self) -> NoDisplay:
            consoles.append(self._console)
            return NoDisplay()

    monkeypatch.setattr("hasten.progress.build.DisplayMaker", RecordingMaker)
    accelerator = hasten.Accelerator(cpu=True)
    for _ in accelerator.progress(range(1)):
        accelerator.progress(range(1))
    assert consoles[0] is consoles[1]


def test_the_short_loops_of_a_file_share_one_line_every_ten_seconds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake_time, file = [100.0], io.StringIO()
    monkeypatch.setattr(time, "perf_counter", lambda: fake_time[0])
    make = DisplayMaker(Console(file=file))
    for epoch in range(12):
        for _ in Progress(
            range(8), here=BarContext(display=make()), desc=f"epoch {epoch}"
        ):
            fake_time[0] += 0.25
    lines = [line.split(" | ")[0] for line in file.getvalue().splitlines()]
    assert lines == ["epoch 0 8/8 100%", "epoch 5 8/8 100%", "epoch 10 8/8 100%"]


def test_a_short_batch_counts_its_samples_and_tokens() -> None:
    """30 samples in batches of 8: the last batch has 6."""
    sheet, accelerator = RecordingDisplay(), hasten.Accelerator(cpu=True)
    rows: Any = [{"input_ids": torch.zeros(5, dtype=torch.long)}] * 30
    for settings in ({}, {"pad": "full"}):
        loader = hasten.Accelerator(cpu=True, dataloader_config=settings).prepare(
            DataLoader(rows, batch_size=8)
        )
        bar = Progress[Any](loader, here=BarContext(display=sheet))
        for _ in bar:
            pass
        assert (bar._meter.samples, bar._meter.tokens) == (30, 150)
    accelerator.end_training()


def test_the_hint_is_shown_by_the_bar_whose_steps_are_slow() -> None:
    store = HashStore()
    watch, pulse = (
        StragglerWatch(store, 0, 2, every_s=0.0),
        BackwardTimer(torch.device("cpu")),
    )
    outer, inner = RecordingDisplay(), RecordingDisplay()
    PrefixStore("hasten/pace", store).set("1", "5.0")
    for _ in Progress(range(1), here=BarContext(display=outer, watch=watch)):
        for _ in Progress(
            range(2), here=BarContext(display=inner, pulse=pulse, watch=watch)
        ):
            pulse.backward()
    assert inner.readings[-1].hint.startswith("rank 1 is slower than the others")
    assert outer.readings[-1].hint == ""


def test_a_loop_that_is_left_ends_with_the_process_in_peace() -> None:
    program = "\n".join(
        [
            "from hasten import Accelerator",
            "steps = iter(Accelerator(cpu=True).progress(range(10), desc='left'))",
            "next(steps), next(steps)",
        ]
    )
    completed = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert "left" in completed.stderr + completed.stdout
    assert "Traceback" not in completed.stderr
    assert "ignored" not in completed.stderr


def test_a_resumed_loader_is_counted_from_where_it_stands() -> None:
    def prepared() -> tuple[hasten.Accelerator, Any]:
        accelerator = hasten.Accelerator(cpu=True)
        return accelerator, accelerator.prepare(
            DataLoader(TensorDataset(torch.arange(40.0)), batch_size=2)
        )

    _, loader = prepared()
    for number, _ in enumerate(loader, 1):
        if number == 7:
            state = loader.state_dict()
    _, resumed = prepared()
    resumed.load_state_dict(state)
    sheets = [RecordingDisplay(), RecordingDisplay()]
    for sheet in sheets:
        assert sum(
            1 for _ in Progress(resumed, here=BarContext(display=sheet))
        ) == 20 - 7 * (sheet is sheets[0])
    first, second = (sheet.readings for sheet in sheets)
    assert [(first[0].step, first[0].total), (first[-1].step, first[-1].total)] == [
        (8, 20),
        (20, 20),
    ]
    assert (second[0].step, second[-1].step) == (1, 20)
    assert first[-1].steps_per_s * first[-1].elapsed_s == pytest.approx(13), (
        "rates are those of this run"
    )


def test_steps_done_before_are_given_by_hand() -> None:
    sheet = RecordingDisplay()
    with Progress[Any](here=BarContext(display=sheet), total=10, initial=4) as bar:
        bar.update()
    assert [reading.step for reading in sheet.readings] == [5, 5]
    assert sheet.readings[-1].steps_per_s * sheet.readings[
        -1
    ].elapsed_s == pytest.approx(1)


def test_forced_colour_makes_no_terminal_of_a_pipe() -> None:
    program = (
        "from hasten import Accelerator\nbar = Accelerator(cpu=True).progress(range(3), desc='train', every_s=0.0)\n"
        "for _ in bar: bar.note('beside it')"
    )
    completed = subprocess.run(
        [sys.executable, "-c", program],
        # as a notebook's kernel has them
        env={**os.environ, "FORCE_COLOR": "1", "TERM": "xterm-color"},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "\x1b" not in completed.stderr
    assert completed.stderr.splitlines()[-1].startswith("train 3/3 100%")
    assert completed.stderr.count("beside it") == 3


def test_notes_of_a_file_are_not_for_displays_in_place() -> None:
    file = io.StringIO()
    console = Console(
        file=file,
        force_terminal=True,
        force_jupyter=False,
        width=120,
        _environ={"TERM": "xterm"},
    )
    with Progress[Any](
        here=BarContext(display=TerminalDisplay(console, 0.0)), total=2
    ) as bar:
        bar.note("[always]")
        bar.note("in files", unless_in_place=True)
    assert "[always]" in file.getvalue()
    assert "in files" not in file.getvalue()
