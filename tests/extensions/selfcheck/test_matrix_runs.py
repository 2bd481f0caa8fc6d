"""`hasten test --matrix` for real: the self-check passes in a cell, and a cell that fails is exit code 1."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hasten.extensions.selfcheck import matrix
from hasten.extensions.selfcheck.command import main


@pytest.mark.parametrize(
    "name",
    [
        "single-fp32",
        *(
            pytest.param(name, marks=pytest.mark.exhaustive)
            for name in ("ddp-bf16", "pp-fp32")
        ),
    ],
)
def test_a_cell_equals_one_plain_process(
    capsys: pytest.CaptureFixture[str], name: str
) -> None:
    assert main(["--matrix", "--cpu", "--only", name]) == 0
    line = rf"passed  {name} +8 updates, \w+: losses differ from one process by \S+\n"
    assert re.fullmatch(line, capsys.readouterr().out)


def test_a_failure_is_exit_code_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "other_check.py").write_text("raise ValueError('this cell cannot run')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(matrix, "PROGRAM", "other_check")
    assert main(["--matrix", "--cpu", "--only", "single-fp32"]) == 1
    assert re.match(
        r"FAILED  single-fp32 .*ValueError: this cell cannot run",
        capsys.readouterr().out,
    )
