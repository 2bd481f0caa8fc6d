"""Notebooks for real: a Jupyter kernel runs cells that train, fail, run again and are interrupted."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Final

import pytest

from hasten.errors import LaunchError
from hasten.launch.notebook import notebook_launcher

pytestmark = pytest.mark.slow

SETUP: Final = """
import os, json
from hasten import debug_launcher, notebook_launcher
factor = 3  # a global of the notebook travels with the function
def train(x, fail_on=None):
    rank = int(os.environ["RANK"])
    print("rank", rank, "works", flush=True)
    if rank == fail_on:
        raise ValueError("boom in the cell")
    handed = dict(row[:2] for row in json.loads(os.environ["HASTEN_CONFIG"])["settings"])
    return x * factor, int(os.environ["WORLD_SIZE"]), handed["mixed_precision"]
"""
TRAIN: Final = 'print(notebook_launcher(train, (5,), num_processes=2, mixed_precision="bf16", cpu=True))'
FAIL: Final = 'notebook_launcher(train, (5, 1), num_processes=2, mixed_precision="bf16", cpu=True)'
HELPER: Final = (
    "import local_module\nprint(debug_launcher(local_module.name, num_processes=1))"
)

DRIVER: Final = """
import sys
import nbformat
from nbclient import NotebookClient
notebook = nbformat.read(sys.argv[1], as_version=4)
NotebookClient(notebook, timeout=110, kernel_name="python3", allow_errors=True).execute()
nbformat.write(notebook, sys.argv[1])
"""


def run_cells(folder: Path, *cells: str) -> list[list[dict[str, Any]]]:
    """The outputs of each cell, run in order by one kernel."""
    notebook = {
        "nbformat": 4,
        "nbformat_minor": 5,
        "metadata": {},
        "cells": [
            {
                "cell_type": "code",
                "id": f"c{i}",
                "source": text,
                "metadata": {},
                "outputs": [],
                "execution_count": None,
            }
            for i, text in enumerate(cells)
        ],
    }
    path = folder / "book.ipynb"
    path.write_text(json.dumps(notebook))
    env = {
        **os.environ,
        "HASTEN_HOME": str(folder / "home"),
        "HF_HOME": str(folder / "hf"),
        "IPYTHONDIR": str(folder),
    }
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", DRIVER, str(path)],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return [cell["outputs"] for cell in json.loads(path.read_text())["cells"]]


def printed(outputs: list[dict[str, Any]]) -> str:
    """What a cell printed."""
    return "".join("".join(output.get("text", "")) for output in outputs)


def test_cells_train_fail_and_run_again(tmp_path: Path) -> None:
    (tmp_path / "local_module.py").write_text("def name():\n    return __name__\n")
    setup, first, failed, repeated, local = run_cells(
        tmp_path, SETUP, TRAIN, FAIL, TRAIN, HELPER
    )
    assert setup == []
    for outputs in (first, repeated):
        assert "rank 0 works\n" in printed(outputs)
        assert "rank 1 works\n" in printed(outputs)
        assert "(15, 2, 'bf16')" in printed(outputs)
    assert "rank 1 on" in printed(failed)
    # the cell's own line, which is in no file
    assert 'raise ValueError("boom in the cell")' in printed(failed)
    assert printed(failed).count("Traceback") == 1
    assert failed[-1]["ename"] == "LaunchError"
    sentence = r"rank 1 \(pid \d+\) failed: ValueError: boom in the cell \(its traceback is in the output above\)"
    assert re.fullmatch(sentence, failed[-1]["evalue"])
    assert "local_module" in printed(local)


INTERRUPTED: Final = """
import os, signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # as in a kernel, whatever this run inherited
from hasten import notebook_launcher
def work(folder):
    with open(f"{folder}/draft", "w") as file: file.write(str(os.getpid()))
    os.rename(f"{folder}/draft", f"{folder}/pid")
    time.sleep(100)
try:
    notebook_launcher(work, (sys.argv[1],), num_processes=1, cpu=True)
except KeyboardInterrupt:
    print("interrupted")
"""


def test_the_stop_button_ends_the_processes(tmp_path: Path) -> None:
    env = {**os.environ, "HASTEN_HOME": str(tmp_path), "HF_HOME": str(tmp_path)}
    command = [sys.executable, "-c", INTERRUPTED, str(tmp_path)]
    with subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, text=True, cwd=tmp_path
    ) as notebook:
        deadline = time.monotonic() + 60
        while not (tmp_path / "pid").exists():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        worker = int((tmp_path / "pid").read_text())
        notebook.send_signal(signal.SIGINT)
        out, _ = notebook.communicate(timeout=60)
    assert out.endswith("interrupted\n")
    with pytest.raises(ProcessLookupError):
        os.kill(worker, 0)


def test_what_cannot_travel_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HASTEN_HOME", str(tmp_path))
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    with (
        (tmp_path / "file").open("w") as handle,
        pytest.raises(LaunchError, match="cannot be pickled"),
    ):
        notebook_launcher(lambda: handle.name)
    with pytest.raises(
        LaunchError,
        match=r"rank 0 \(pid \d+\) failed: .*returned a generator, which cannot be sent back",
    ):
        notebook_launcher(lambda: (i for i in range(3)), num_processes=1, cpu=True)
    assert notebook_launcher(lambda x: {"x": x}, (4,), num_processes=1, cpu=True) == {
        "x": 4
    }
    capfd.readouterr()
