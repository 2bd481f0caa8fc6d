"""`hasten test --matrix` for real: a curve that equals plain torch, one that does not, and a cell that fails."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hasten.cli.test_cmd import main
from hasten.tools import matrix

OTHER = """
import sys
if sys.argv[1:]:
    if "{mode}" == "fail":
        raise ValueError("this cell cannot run")
    from hasten.testing import matrix_run
    plain = matrix_run.plain
    matrix_run.plain = lambda: [loss + 0.5 for loss in plain()]
    sys.exit(matrix_run.main(sys.argv[1]))
"""


@pytest.mark.parametrize(
    ("name", "processes"), [("single-fp32", 1), pytest.param("ddp-fp32", 2, marks=pytest.mark.exhaustive)]
)
def test_a_cell_equals_one_plain_process(capsys: pytest.CaptureFixture[str], name: str, processes: int) -> None:
    assert main(["--matrix", "--cpu", "--only", name, "--json"]) == 0
    out = capsys.readouterr()
    (row,) = json.loads(out.out)
    assert (row["name"], row["processes"], row["status"]) == (name, processes, "equal")
    assert 0 <= row["max_difference"] < 2e-5
    assert row["seconds"] > 0
    assert row["megabytes"] > 0
    assert f"[1/1] {name}" in out.err


@pytest.mark.parametrize(
    ("mode", "status", "note"),
    [
        pytest.param("differ", "DIFFERS", "more than 2e-05", marks=pytest.mark.exhaustive),
        ("fail", "FAILED", "cannot run"),
    ],
)
def test_a_difference_or_a_failure_is_exit_code_1(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    mode: str,
    status: str,
    note: str,
) -> None:
    (tmp_path / "other_matrix_run.py").write_text(OTHER.format(mode=mode))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(matrix, "PROGRAM", "other_matrix_run")
    assert main(["--matrix", "--cpu", "--only", "single-fp32"]) == 1
    out = capsys.readouterr()
    assert status in out.out
    assert f"[1/1] single-fp32: {status}" in out.err
    assert " ".join(note.split()[:1]) in out.out
