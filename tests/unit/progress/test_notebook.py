"""Progress in a real notebook: one output of the cell, updated in place."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

CELL = """
from hasten import Accelerator

bar = Accelerator(cpu=True).progress(range(5), desc="train", every_s=0.0)
for _ in bar:
    bar.show(loss=0.5)
"""
# a process of its own: the notebook client keeps sockets open for as long as it lives
CLIENT = """
import json, sys
import nbclient, nbformat
notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(sys.argv[1])])
nbclient.NotebookClient(notebook, timeout=90).execute()
print(json.dumps(notebook.cells[0].outputs))
"""


def test_a_cell_shows_one_output_that_is_updated(tmp_path: Path) -> None:
    for package in ("nbformat", "nbclient", "ipykernel"):
        pytest.importorskip(package)
    completed = subprocess.run(
        [sys.executable, "-c", CLIENT, CELL],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert completed.returncode == 0, completed.stderr
    outputs = json.loads(completed.stdout.splitlines()[-1])
    shown = [
        output["data"] for output in outputs if output["output_type"] == "display_data"
    ]
    assert len(shown) == 1
    assert shown[0]["text/plain"].startswith("train 5/5 100% | loss 0.5")
    assert '<progress value="5" max="5">' in shown[0]["text/html"]


LAUNCHING = """
from hasten import Accelerator, notebook_launcher

def train():
    for _ in Accelerator(cpu=True).progress(range(5), desc="train", every_s=0.0):
        pass

notebook_launcher(train, num_processes=2, cpu=True)
"""


@pytest.mark.exhaustive
def test_the_processes_of_a_cell_write_lines(tmp_path: Path) -> None:
    for package in ("nbformat", "nbclient", "ipykernel"):
        pytest.importorskip(package)
    completed = subprocess.run(
        [sys.executable, "-c", CLIENT, LAUNCHING],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert completed.returncode == 0, completed.stderr
    outputs = json.loads(completed.stdout.splitlines()[-1])
    text = "".join(
        output["text"] for output in outputs if output["output_type"] == "stream"
    )
    assert "train 5/5 100%" in text
    assert "\x1b" not in text, "no codes that move a cursor"
