"""The README tells the truth: its script runs on one and two processes, its commands parse, its files exist."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Final

import pytest

from hasten.cli.main import main

ROOT: Final = Path(__file__).parents[2]
TEXT: Final = (ROOT / "README.md").read_text("utf-8")


def blocks(language: str) -> list[str]:
    """The README's code blocks of one language."""
    return re.findall(rf"```{language}\n(.*?)```", TEXT, re.DOTALL)


@pytest.mark.parametrize(
    "command",
    [["-m", "hasten.cli.main", "launch", "--cpu", "--num_processes", "2"], []],
)
def test_the_script_runs(tmp_path: Path, command: list[str]) -> None:
    (script,) = blocks("python")
    (tmp_path / "train.py").write_text(script, "utf-8")

    def run() -> str:
        command_line = [sys.executable, *command, "train.py"]
        completed = subprocess.run(
            command_line,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=110,
            check=False,
        )
        assert completed.returncode == 0, completed.stderr
        return completed.stdout

    first_output = run()
    score = re.findall(r"(\d+) of 256 right", first_output)[0]
    assert int(score) > 245, "it learns the rule"
    checkpoints = sorted(
        path.name for path in (tmp_path / "runs/readme/checkpoints").iterdir()
    )
    assert len(checkpoints) == 12
    assert f"{score} of 256 right" in run(), "a finished run trains nothing more"
    assert (
        sorted(path.name for path in (tmp_path / "runs/readme/checkpoints").iterdir())
        == checkpoints
    )


def test_the_three_lines_are_those_of_the_script() -> None:
    (diff,) = blocks("diff")
    added = [line[1:].strip() for line in diff.splitlines() if line.startswith("+")]
    assert added[0] == "from hasten import Accelerator"
    assert [line.split("(")[0].split(" = ")[-1] for line in added[1:]] == [
        "Accelerator",
        "accelerator.prepare",
        "accelerator.backward",
    ]


def test_every_command_is_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [
        line.split("#")[0].strip()
        for block in blocks("bash")
        for line in block.splitlines()
        if line.strip()
    ]
    targets = set(
        re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
    )
    script = tmp_path / "train.py"
    script.write_text("", "utf-8")
    for line in lines:
        program, *words = line.split()
        if program == "make":
            assert words[0] in targets
        elif words[:1] == ["launch"]:
            assert main([*words[:-1], "--dry-run", str(script)]) == 0
        elif program == "hasten":
            assert main([*words, "--help"]) == 0
        elif program == "pip":
            extras = set(re.findall(r"[a-z0-9]+", line.partition("[")[2]))
            assert extras <= set(
                tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"][
                    "optional-dependencies"
                ]
            )
        else:
            assert line == "python train.py"
    capsys.readouterr()


def test_every_file_it_names_exists() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", TEXT):
        assert (ROOT / target).exists(), target
    for name in re.findall(r"`([a-z_]+\.(?:md|json))`", TEXT):
        assert (ROOT / "benchmarks/results" / name).is_file(), name
    for pattern in re.findall(r"`((?:tests|src)/[^`]+)`", TEXT):
        assert list(ROOT.glob(pattern)), pattern
