"""`hasten report`: thinning keeps peaks, runs are laid over each other, the page is one file that a browser draws."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hasten.cli.main import main
from hasten.errors import ConfigError
from hasten.extensions.report import report_data
from hasten.extensions.report.report_data import MOST_POINTS, thin_curve
from hasten.extensions.report.run_folder import Curve, read_run
from hasten.tracking.run_log import PARTS, step_dtype

START_TIME = 1_700_000_000.0


def write_run(
    folder: Path, rate: float, ranks: int = 2, steps: int = 50, starts: int = 1
) -> Path:
    """A run's folder as a training leaves it."""
    (folder / "mine" / "one").mkdir(parents=True)
    (folder / "run_log").mkdir()
    rows = [
        {
            "step": step,
            "time": START_TIME + step,
            "values": {"loss": 1 / (1 + step), "text": "a", "lr": rate},
        }
        for step in range(steps)
    ]
    lines = [json.dumps(row) for row in rows] + [
        '{"rewind": 40}',
        '{"step": 41, "time": 1700000100.0, "values": {"loss": "NaN"}}',
        '{"st',
    ]
    (folder / "mine" / "one" / "metrics.jsonl").write_text("\n".join(lines))
    (folder / "mine" / "one" / "config.json").write_text(
        json.dumps({"lr": rate, "deep": {"er": "</script><b>"}})
    )
    for start in range(starts):
        for rank in range(ranks):
            start_time = START_TIME + 200 * start
            table = np.zeros(steps, step_dtype())
            table["time"] = start_time + np.arange(steps)
            for step_part in PARTS:
                table[step_part] = 0.001 * (rank + 1)
            table["samples"], table["memory_mb"] = 8, 100
            stem = folder / "run_log" / f"rank{rank}-{int(start_time * 1000)}"
            stem.with_suffix(".steps").write_bytes(table.tobytes())
            events = [
                {"event": "started", "time": start_time, "rank": rank, "parts": PARTS, "settings": {"mixed_precision": ["bf16", "flag"]},
                 "world_size": ranks, "versions": {"torch": "2.13"}},
                {"event": "saved", "time": start_time + 10, "seconds": 0.5},
            ]  # fmt: skip
            stem.with_suffix(".jsonl").write_text(
                "\n".join(json.dumps(event) for event in events)
            )
    return folder


@pytest.mark.parametrize("length", [1, 10, MOST_POINTS, MOST_POINTS + 1, 100_001])
def test_thinning_keeps_the_extremes_and_the_order(length: int) -> None:
    values = np.random.default_rng(0).normal(size=length)
    curve = thin_curve(
        Curve(np.arange(length), np.arange(length, dtype=np.float64), values)
    )
    assert len(curve.values) <= MOST_POINTS
    assert (curve.values.min(), curve.values.max()) == (values.min(), values.max())
    assert (np.diff(curve.steps) > 0).all()


def test_a_million_points_stay_small(tmp_path: Path) -> None:
    table = np.zeros(1_000_000, step_dtype())
    table["time"], table["data"], table["samples"] = (
        START_TIME + np.arange(1_000_000),
        0.001,
        1,
    )
    run = read_run(write_run(tmp_path / "run", 0.1))
    charts = report_data.all_charts(
        [
            type(run)(
                run.name,
                run.curves,
                (type(run.ranks[0])(0, table, run.ranks[0].events),),
            )
        ]
    )
    assert len(json.dumps(charts)) < 300_000


def test_what_a_folder_tells(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "run", 0.1, starts=2))
    # rewound to 40, then 41
    assert run.curves["loss"].steps.tolist() == list(range(42))
    assert np.isnan(run.curves["loss"].values[-1])
    assert [event["event"] for event in run.events] == [
        "started",
        "saved",
        "restarted",
        "saved",
    ]
    assert run.settings["mixed_precision"] == ("bf16", "flag")
    assert run.settings["deep.er"][0] == "</script><b>"
    rows = report_data.rank_rows(run)
    assert [row[:4] for row in rows] == [
        ["0", "100", "6.00", "6.00"],
        ["1", "100", "12.00", "12.00"],
    ]
    (throughput,) = [
        chart
        for chart in report_data.all_charts([run])
        if chart["title"].startswith("throughput")
    ]
    assert [trace["y"][0] for trace in throughput["traces"]] == [
        pytest.approx(8 / 0.006, rel=1e-4)
    ] * 2
    stacked_chart = next(
        chart for chart in report_data.all_charts([run]) if chart.get("stacked")
    )
    assert [trace["name"] for trace in stacked_chart["traces"]] == list(PARTS)
    # every start begins and ends at 0: a missing value would draw a ramp between starts
    for trace in stacked_chart["traces"]:
        assert None not in trace["y"]
        assert trace["y"][0] == trace["y"][-1] == 0.0
        assert trace["y"].count(0.0) >= 4
    assert len(set(report_data.COLOURS)) == len(report_data.COLOURS) >= len(PARTS)


def test_differences_name_what_is_not_the_same(tmp_path: Path) -> None:
    runs = [
        read_run(write_run(tmp_path / name, rate, ranks))
        for name, rate, ranks in (("a", 0.1, 1), ("b", 0.2, 2))
    ]
    assert report_data.difference_rows(runs) == [
        ["lr", "0.1", "0.2"],
        ["world_size", "1", "2"],
    ]


def page_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    folders = [
        write_run(tmp_path / name / "run", rate)
        for name, rate in (("a", 0.1), ("b", 0.2))
    ]
    out = tmp_path / "pages" / "both.html"
    assert main(["report", *map(str, folders), "-o", str(out)]) == 0
    assert capsys.readouterr().out.strip() == str(out)
    return out


def test_the_page_is_one_file_without_a_network(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = page_of(tmp_path, capsys).read_text("utf-8")
    assert "https://" not in text
    assert "http://" not in text
    assert "</script><b>" not in text
    match = re.search(
        r'<script id="data" type="application/json">(.*?)</script>', text, re.DOTALL
    )
    assert match is not None
    data: dict[str, Any] = json.loads(match[1])
    loss = data["charts"][0]
    assert loss["title"] == "loss"
    assert [trace["name"] for trace in loss["traces"]] == [
        str(tmp_path / name / "run") for name in "ab"
    ]
    assert "What differs" in text


def drawn_by_chromium(page: Path, folder: Path) -> str:
    """The page's elements after its scripts have run."""
    command = [
        "chromium",
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={folder / 'profile'}",
        "--dump-dom",
        page.as_uri(),
    ]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=100, check=True
    ).stdout


def ready_ms(shown: str) -> int:
    """How long after its opening the page had drawn every chart, as it says itself."""
    match = re.search(r'data-ready-ms="(\d+)"', shown)
    assert match is not None
    return int(match[1])


@pytest.mark.exhaustive
@pytest.mark.skipif(
    shutil.which("chromium") is None, reason="no Chromium on this machine"
)
def test_a_run_of_a_million_points_opens_in_three_seconds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """500,000 steps on each of two ranks, with two metrics each."""
    run = write_run(tmp_path / "run", 0.1, steps=500_000)
    out = tmp_path / "report.html"
    assert main(["report", str(run), "-o", str(out)]) == 0
    capsys.readouterr()
    assert ready_ms(drawn_by_chromium(out, tmp_path)) < 3000


@pytest.mark.skipif(
    shutil.which("chromium") is None, reason="no Chromium on this machine"
)
def test_a_browser_draws_every_chart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = drawn_by_chromium(page_of(tmp_path, capsys), tmp_path)
    assert ready_ms(shown) > 0
    num_charts = len(
        report_data.all_charts([read_run(tmp_path / name / "run") for name in "ab"])
    )
    assert shown.count('class="drawn"') >= num_charts


def test_a_folder_without_a_run_ends_with_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(tmp_path)]) == 2
    assert "nothing to report" in capsys.readouterr().err


def test_other_formats_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        main(["report", str(write_run(tmp_path / "run", 0.1)), "-o", "report.pdf"]) == 2
    )
    assert "does not end in .html" in capsys.readouterr().err


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="log_with='jsonl'"):
        read_run(tmp_path)
