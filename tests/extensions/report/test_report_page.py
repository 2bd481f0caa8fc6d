"""The report's page: any name of a metric, readable time axes, wide and narrow."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from hasten.cli.main import main
from hasten.extensions.report import report_data
from hasten.extensions.report.report_page import script_json
from hasten.extensions.report.run_folder import read_run

START_TIME = 1_700_000_000.0
HOSTILE = (
    "<!--<script>",
    "</script><b>",
    "]]>",
    "a & b",
    "\u2028\u2029",
    "__DATA__",
    "x" * 300,
)
BROWSER = shutil.which("chromium")
MEASURED = """<script>
const boxes = (kind) => [...document.querySelectorAll(kind)].map((found) => found.getBoundingClientRect());
const cut = boxes(".plot text").filter((box, at, all) => box.width && (box.left < -1 || box.right > innerWidth + 1)).length;
const over = [...document.querySelectorAll(".chart")].filter((chart) => {
  const legend = chart.querySelector(".legend");
  return legend && [...chart.querySelectorAll("text")].some((text) => text.getBoundingClientRect().bottom > legend.getBoundingClientRect().top + 1);
}).length;
document.body.dataset.measured = JSON.stringify({ wide: document.documentElement.scrollWidth - document.documentElement.clientWidth, cut, over });
</script></body>"""


def write_run(folder: Path, rows: list[dict[str, Any]]) -> Path:
    """A folder as the jsonl tracker leaves it; Any: JSON values."""
    folder.mkdir(parents=True)
    lines = [json.dumps({"time": START_TIME + row["step"], **row}) for row in rows]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def odd_run(folder: Path) -> Path:
    """Curves with hostile names, gaps and no finite value."""
    rows: list[dict[str, Any]] = []
    for step in range(20):
        values: dict[str, Any] = dict.fromkeys(HOSTILE, step)
        values |= {
            "gaps": "NaN" if step % 2 else step,
            "all_nan": "NaN",
            "inf": "Infinity" if step == 3 else 1e-9 * step,
        }
        rows.append({"step": step, "values": values})
    return write_run(folder, rows)


def data_of(page: str) -> dict[str, Any]:
    """What the page's scripts read, as a browser finds it: the text up to the first end of its element."""
    match = re.search(
        r'<script id="data" type="application/json">(.*?)</script',
        page,
        re.DOTALL | re.IGNORECASE,
    )
    assert match is not None
    assert not re.search("[<>&\u2028\u2029]", match[1])
    data: dict[str, Any] = json.loads(match[1])
    return data


def drawn(page: Path, folder: Path, width: int = 1280) -> str:
    """The page's elements after its scripts have run."""
    assert BROWSER is not None
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'profile'}",
               f"--window-size={width},2000", "--virtual-time-budget=3000", "--dump-dom", page.as_uri()]  # fmt: skip
    return subprocess.run(
        command, capture_output=True, text=True, timeout=100, check=True
    ).stdout


def report(runs: list[Path], page: Path) -> str:
    """The page of `hasten report`."""
    assert main(["report", *map(str, runs), "-o", str(page)]) == 0
    return page.read_text("utf-8")


def test_any_name_of_a_metric_stays_inside_its_script(tmp_path: Path) -> None:
    data = data_of(report([odd_run(tmp_path / "run")], tmp_path / "report.html"))
    assert {*HOSTILE, "gaps", "all_nan", "inf"} == {
        chart["title"] for chart in data["charts"]
    }
    assert json.loads(script_json({"<!--": "\u2028</script>&"})) == {
        "<!--": "\u2028</script>&"
    }


def test_the_page_is_small(tmp_path: Path) -> None:
    text = report([odd_run(tmp_path / "run")], tmp_path / "report.html")
    assert len(text) < 200_000
    assert len(data_of(text)["charts"]) == len(HOSTILE) + 3


@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")
@pytest.mark.parametrize("width", [1280, 500])
def test_a_browser_draws_odd_runs_inside_the_window(tmp_path: Path, width: int) -> None:
    runs, page = (
        [odd_run(tmp_path / "a"), odd_run(tmp_path / "b")],
        tmp_path / "report.html",
    )
    text = report(runs, page)
    page.write_text(text.replace("</body>", MEASURED), "utf-8")
    shown = drawn(page, tmp_path, width)
    assert 'data-ready-ms="' in shown
    num_charts = len(report_data.all_charts([read_run(run) for run in runs]))
    assert shown.count('class="chart"') == num_charts
    assert shown.count('class="drawn"') >= num_charts
    assert "no finite value" in shown
    measured = re.search(r'data-measured="([^"]*)"', shown)
    assert measured is not None
    assert json.loads(measured[1].replace("&quot;", '"')) == {
        "wide": 0,
        "cut": 0,
        "over": 0,
    }


@pytest.mark.parametrize(
    ("longest_s", "name", "last"),
    [
        (30, "seconds", 30),
        (170, "seconds", 170),
        (600, "minutes", 10),
        (36000, "hours", 10),
    ],
)
def test_the_unit_of_time_suits_the_run(
    tmp_path: Path, longest_s: int, name: str, last: float
) -> None:
    rows = [{"step": step, "values": {"loss": 1.0}} for step in (0, longest_s)]
    data = data_of(
        report([write_run(tmp_path / "run", rows)], tmp_path / "report.html")
    )
    assert data["unit"]["name"] == name
    assert data["charts"][0]["traces"][0]["minutes"][-1] * data["unit"][
        "per_minute"
    ] == pytest.approx(last, abs=1e-3)


def test_durations_are_spelled() -> None:
    spelled = [
        report_data.duration_text(seconds / 60)
        for seconds in (0, 0.0123, 16.84, 61, 3661)
    ]
    assert spelled == ["0 s", "0.0123 s", "16.8 s", "0:01:01", "1:01:01"]


def test_a_run_without_a_value_has_a_page(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "metrics.jsonl").write_text("")
    text = report([run], tmp_path / "report.html")
    assert data_of(text)["charts"] == []
    if BROWSER is not None:
        assert (
            "there is no curve to draw"
            in drawn(tmp_path / "report.html", tmp_path).rpartition("<script")[0]
        )
