"""`hasten report`: thinning keeps peaks, runs are laid over each other, the page is one file that a browser draws."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hasten.cli.main import main
from hasten.optional import available
from hasten.tools.report import report_data
from hasten.tools.report.report_data import MOST_POINTS, thinned
from hasten.tracking.run_folder import Curve, read_run
from hasten.tracking.run_log import PARTS, step_dtype

pytest.importorskip("plotly")
BEGAN = 1_700_000_000.0


def write_run(folder: Path, rate: float, ranks: int = 2, steps: int = 50, starts: int = 1) -> Path:
    """A run's folder as a training leaves it."""
    (folder / "mine" / "one").mkdir(parents=True)
    (folder / "run_log").mkdir()
    rows = [
        {"step": step, "time": BEGAN + step, "values": {"loss": 1 / (1 + step), "text": "a", "lr": rate}}
        for step in range(steps)
    ]
    lines = [json.dumps(row) for row in rows] + [
        '{"rewind": 40}',
        '{"step": 41, "time": 1700000100.0, "values": {"loss": "NaN"}}',
        '{"st',
    ]
    (folder / "mine" / "one" / "metrics.jsonl").write_text("\n".join(lines))
    (folder / "mine" / "one" / "config.json").write_text(json.dumps({"lr": rate, "deep": {"er": "</script><b>"}}))
    for start in range(starts):
        for rank in range(ranks):
            began = BEGAN + 200 * start
            table = np.zeros(steps, step_dtype())
            table["time"] = began + np.arange(steps)
            for part in PARTS:
                table[part] = 0.001 * (rank + 1)
            table["samples"], table["memory_mb"] = 8, 100
            stem = folder / "run_log" / f"rank{rank}-{int(began * 1000)}"
            stem.with_suffix(".steps").write_bytes(table.tobytes())
            events = [
                {"event": "started", "time": began, "rank": rank, "parts": PARTS, "settings": {"mixed_precision": ["bf16", "flag"]},
                 "world_size": ranks, "versions": {"torch": "2.13"}},
                {"event": "saved", "time": began + 10, "seconds": 0.5},
            ]  # fmt: skip
            stem.with_suffix(".jsonl").write_text("\n".join(json.dumps(event) for event in events))
    return folder


@pytest.mark.parametrize("length", [1, 10, MOST_POINTS, MOST_POINTS + 1, 100_001])
def test_thinning_keeps_the_extremes_and_the_order(length: int) -> None:
    values = np.random.default_rng(0).normal(size=length)
    curve = thinned(Curve(np.arange(length), np.arange(length, dtype=np.float64), values))
    assert len(curve.values) <= MOST_POINTS
    assert (curve.values.min(), curve.values.max()) == (values.min(), values.max())
    assert (np.diff(curve.steps) > 0).all()


def test_a_million_points_stay_small(tmp_path: Path) -> None:
    table = np.zeros(1_000_000, step_dtype())
    table["time"], table["data"], table["samples"] = BEGAN + np.arange(1_000_000), 0.001, 1
    run = read_run(write_run(tmp_path / "run", 0.1))
    charts = report_data.charts([type(run)(run.name, run.curves, (type(run.ranks[0])(0, table, run.ranks[0].events),))])
    assert len(json.dumps(charts)) < 300_000


def test_what_a_folder_tells(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "run", 0.1, starts=2))
    assert run.curves["loss"].steps.tolist() == list(range(42))  # rewound to 40, then 41
    assert np.isnan(run.curves["loss"].values[-1])
    assert [event["event"] for event in run.events] == ["started", "saved", "restarted", "saved"]
    assert run.settings["mixed_precision"] == ("bf16", "flag")
    assert run.settings["deep.er"][0] == "</script><b>"
    rows = report_data.spread(run)
    assert [row[:4] for row in rows] == [["0", "100", "6.00", "6.00"], ["1", "100", "12.00", "12.00"]]
    (throughput,) = [chart for chart in report_data.charts([run]) if chart["title"].startswith("throughput")]
    assert [trace["y"][0] for trace in throughput["traces"]] == [pytest.approx(8 / 0.006, rel=1e-4)] * 2
    parts = next(chart for chart in report_data.charts([run]) if chart.get("stacked"))
    assert [trace["name"] for trace in parts["traces"]] == list(PARTS)
    for trace in parts["traces"]:  # every start begins and ends at 0: a missing value would draw a ramp between starts
        assert None not in trace["y"]
        assert trace["y"][0] == trace["y"][-1] == 0.0
        assert trace["y"].count(0.0) >= 4
    assert len(set(report_data.COLOURS)) == len(report_data.COLOURS) >= len(PARTS)


def test_differences_name_what_is_not_the_same(tmp_path: Path) -> None:
    runs = [read_run(write_run(tmp_path / name, rate, ranks)) for name, rate, ranks in (("a", 0.1, 1), ("b", 0.2, 2))]
    assert report_data.differences(runs) == [["lr", "0.1", "0.2"], ["world_size", "1", "2"]]


def page_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    folders = [write_run(tmp_path / name / "run", rate) for name, rate in (("a", 0.1), ("b", 0.2))]
    out = tmp_path / "pages" / "both.html"
    assert main(["report", *map(str, folders), "-o", str(out)]) == 0
    assert capsys.readouterr().out.strip() == str(out)
    return out


def test_the_page_is_one_file_without_a_network(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = page_of(tmp_path, capsys).read_text("utf-8")
    ours = re.sub(r"<script>/\*.*?</script>", "", text, count=1, flags=re.DOTALL)
    assert "http://" not in ours
    assert "https://" not in ours
    assert "</script><b>" not in text
    found = re.search(r'<script id="data" type="application/json">(.*?)</script>', text, re.DOTALL)
    assert found is not None
    data: dict[str, Any] = json.loads(found[1])
    loss = data["charts"][0]
    assert loss["title"] == "loss"
    assert [trace["name"] for trace in loss["traces"]] == [str(tmp_path / name / "run") for name in "ab"]
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
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=True).stdout


def ready_ms(shown: str) -> int:
    """How long after its opening the page had drawn every chart, as it says itself."""
    found = re.search(r'data-ready-ms="(\d+)"', shown)
    assert found is not None
    return int(found[1])


@pytest.mark.exhaustive
@pytest.mark.skipif(shutil.which("chromium") is None, reason="no Chromium on this machine")
def test_a_run_of_a_million_points_opens_in_three_seconds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """500,000 steps on each of two ranks, with two metrics each."""
    run = write_run(tmp_path / "run", 0.1, steps=500_000)
    out = tmp_path / "report.html"
    assert main(["report", str(run), "-o", str(out)]) == 0
    capsys.readouterr()
    assert ready_ms(drawn_by_chromium(out, tmp_path)) < 3000


@pytest.mark.skipif(shutil.which("chromium") is None, reason="no Chromium on this machine")
def test_a_browser_draws_every_chart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = drawn_by_chromium(page_of(tmp_path, capsys), tmp_path)
    assert ready_ms(shown) > 0
    num_charts = len(report_data.charts([read_run(tmp_path / name / "run") for name in "ab"]))
    assert shown.count('class="main-svg"') >= num_charts


def test_a_folder_without_a_run_ends_with_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path)]) == 2
    assert "nothing to report" in capsys.readouterr().err


def test_a_picture_has_every_chart(tmp_path: Path) -> None:
    """In a process of its own, because matplotlib keeps files of fonts open."""
    if not available("matplotlib"):
        pytest.skip("matplotlib is not installed")
    run, out = write_run(tmp_path / "run", 0.1, starts=2), tmp_path / "new" / "report.png"
    command = [sys.executable, "-m", "hasten.cli.main", "report", str(run), "-o", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stdout) == (0, f"{out}\n"), done.stderr
    content = out.read_bytes()
    assert content.startswith(b"\x89PNG")
    width, height = (int.from_bytes(content[at : at + 4], "big") for at in (16, 20))
    rows = -(-len(report_data.charts([read_run(run)])) // 2)
    assert (width, height) == (1280, 320 * rows)
    assert [path.name for path in out.parent.iterdir()] == ["report.png"], "no draft is left"


@pytest.mark.parametrize(
    ("words", "said"), [(["-o", "report.pdf"], "neither in .html nor in .png"), (["--every", "0"], "seconds above 0")]
)
def test_other_forms_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    assert main(["report", str(write_run(tmp_path / "run", 0.1)), *words]) == 2
    assert said in capsys.readouterr().err


TRAINING = """
import time
import torch
from hasten import Accelerator
time.sleep(1)
accelerator = Accelerator(project_dir="run", log_with="jsonl", cpu=True)
model = torch.nn.Linear(2, 1)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
loader = accelerator.prepare(torch.utils.data.DataLoader(torch.ones(4000, 2), batch_size=1))
accelerator.init_trackers("mine")
for batch in loader:
    loss = model(batch).square().mean()
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    accelerator.log({"loss": loss})
    time.sleep(0.05)
"""
FOLLOW = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # as in a terminal, whatever this run inherited
from hasten.cli.main import main
sys.exit(main(["report", "run", "-o", "page.html", "--live", "--every", "0.3"]))
"""


def points(page: Path) -> int:
    """How many losses a page shows; 0 where there is none yet."""
    if not page.exists():
        return 0
    found = re.search(r'<script id="data" type="application/json">(.*?)</script>', page.read_text("utf-8"), re.DOTALL)
    assert found, "half a page"
    charts = json.loads(found[1].replace("<\\/", "</"))["charts"]
    return max((len(chart["traces"][0]["y"]) for chart in charts if chart["title"] == "loss"), default=0)


def wait_for(condition: Callable[[], bool]) -> None:
    """Wait until it holds.

    Raises: AssertionError after 80 seconds.
    """
    deadline = time.monotonic() + 80
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.exhaustive
@pytest.mark.timeout(240)
def test_a_running_job_is_followed_until_ctrl_c(tmp_path: Path) -> None:
    """A real training grows its files beside a real `hasten report --live`, which was there first."""
    page = tmp_path / "page.html"
    with (
        subprocess.Popen([sys.executable, "-c", FOLLOW], cwd=tmp_path, stdout=subprocess.PIPE, text=True) as follower,
        subprocess.Popen([sys.executable, "-W", "ignore", "-c", TRAINING], cwd=tmp_path) as training,
    ):
        try:
            wait_for(lambda: points(page) > 1)
            first = points(page)
            wait_for(lambda: points(page) > first + 20)
            assert '"reload_s":0.3' in page.read_text("utf-8")
            follower.send_signal(signal.SIGINT)
            said, _ = follower.communicate(timeout=60)
            assert training.poll() is None, "the training goes on"
        finally:
            training.kill()
            follower.kill()
    assert follower.returncode == 0
    assert said == "page.html: following run; press Ctrl-C to stop\npage.html\n"
    assert '"reload_s":0.0' in page.read_text("utf-8"), "the last page stays as it is"
