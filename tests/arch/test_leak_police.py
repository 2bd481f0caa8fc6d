"""The conftest itself is tested: what a test leaves behind, or a hang, fails that test and names the cause."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

CONFTEST: Final = Path(__file__).parents[1] / "conftest.py"
PREAMBLE: Final = '"""Leaky tests."""\nimport os, signal, subprocess, threading, time, warnings\nimport pytest\n\n'
CLEAN: Final = """
def test_clean(tmp_path, monkeypatch):
    monkeypatch.setenv('A', '1')
    monkeypatch.chdir(tmp_path)
    threading.Thread(target=time.sleep, args=(0.1,)).start()

"""
HANGING: Final = """
@pytest.mark.timeout(0.5)
def test_hanging():
    time.sleep(60)

"""
LEAKS: Final = (
    ("os.environ['LEFT'] = '1'", "environment variable LEFT: None became '1'"),
    (
        "threading.Thread(target=time.sleep, args=(9,), daemon=True, name='idler').start()",
        "thread 'idler' still runs",
    ),
    ("os.open(__file__, 0)", "file descriptor"),
    ("globals().update(child=subprocess.Popen(['sleep', '9']))", "is alive: sleep 9"),
    ("os.chdir('/')", "the working folder moved"),
    ("signal.signal(signal.SIGTERM, signal.SIG_IGN)", "the handler of SIGTERM changed"),
    (
        "import torch.distributed as d; d.init_process_group('gloo', store=d.HashStore(), rank=0, world_size=1)",
        "the default process group is still initialised",
    ),
)


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What pytest prints about one leaky test per entry of LEAKS, a clean one and one that hangs."""
    folder = tmp_path_factory.mktemp("inner")
    police = CONFTEST.read_text("utf-8")
    for setting, replacement in (
        ("GRACE_S: Final = 8.0", "GRACE_S: Final = 0.3"),
        ("MOST_RERUNS: Final = 4", "MOST_RERUNS: Final = 0"),
    ):
        assert setting in police
        police = police.replace(
            setting, replacement
        )  # a leak is reported at once, also where the host takes the processors away
    (folder / "conftest.py").write_text(police)
    (folder / "pytest.ini").write_text(
        f"[pytest]\npythonpath = {CONFTEST.parents[1]}\n"
        "markers =\n    timeout: seconds\nfilterwarnings =\n    error\n"
    )
    leaky = "".join(
        f"def test_leaky_{i}():\n    {statement}\n\n"
        for i, (statement, _) in enumerate(LEAKS)
    )
    (folder / "test_inner.py").write_text(PREAMBLE + CLEAN + HANGING + leaky)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "--rootdir",
        str(folder),
        str(folder),
    ]
    return subprocess.run(
        command, capture_output=True, text=True, cwd=folder, check=False
    ).stdout


@pytest.mark.parametrize("index", range(len(LEAKS)), ids=lambda i: LEAKS[i][1])
def test_leak_is_named(report: str, index: int) -> None:
    leak_report = report.partition(f"test_leaky_{index} left behind:\n")[2].partition(
        "\n_____"
    )[0]
    assert LEAKS[index][1] in leak_report, report


def test_clean_test_passes(report: str) -> None:
    assert f"1 failed, {len(LEAKS) + 1} passed, {len(LEAKS)} errors" in report, report
    assert "test_clean left behind" not in report


def test_hang_is_stopped_with_its_stack(report: str) -> None:
    assert "took longer than 0.5 s" in report
    assert "in test_hanging" in report
