"""The notebook of the examples, run by a real Jupyter kernel: it trains on two processes and draws a curve."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

NOTEBOOK: Final = Path(__file__).parents[2] / "examples" / "two_processes.ipynb"
DRIVER: Final = """
import sys
import nbformat
from nbclient import NotebookClient
notebook = nbformat.read(sys.argv[1], as_version=4)
nbformat.validate(notebook)
NotebookClient(notebook, timeout=110, kernel_name="python3").execute()
nbformat.write(notebook, sys.argv[2])
"""


@pytest.mark.exhaustive
def test_it_trains_on_two_processes_and_draws_a_curve(tmp_path: Path) -> None:
    homes = {
        name: str(tmp_path / name)
        for name in ("HASTEN_HOME", "HF_HOME", "IPYTHONDIR", "MPLCONFIGDIR")
    }
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", DRIVER, str(NOTEBOOK), "done.ipynb"],
        cwd=tmp_path,
        env={**os.environ, **homes},
        capture_output=True,
        text=True,
        timeout=115,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    outputs = [
        output
        for cell in json.loads((tmp_path / "done.ipynb").read_text())["cells"]
        for output in cell.get("outputs", [])
    ]
    printed = "".join("".join(output.get("text", "")) for output in outputs)
    right = [
        int(number)
        for number in re.findall(r"(\d+) of 360 right on 2 processes", printed)
    ]
    assert len(right) == 4, "one process prints, after each of four epochs"
    assert right[-1] > 300
    assert any("image/png" in output.get("data", {}) for output in outputs)


def test_it_is_stored_without_outputs() -> None:
    for cell in json.loads(NOTEBOOK.read_text("utf-8"))["cells"]:
        assert not cell.get("outputs")
        assert cell.get("execution_count") is None
