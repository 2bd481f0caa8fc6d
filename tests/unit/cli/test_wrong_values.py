"""Values of the wrong kind on the command line: every flag takes them or refuses them in a sentence, with exit code 2."""

from __future__ import annotations

from itertools import cycle, islice
from pathlib import Path
from typing import Final

import pytest

from hasten.cli.flags import flag_spellings
from hasten.cli.main import main
from hasten.config.schema import SETTABLE

VALUES: Final = (
    "",
    "x",
    "-1",
    "nan",
    "a\0b",
    "{",
    "[",
    "9" * 40,
    "a=b=c",
    ",",
    "é",
    "1:0",
    "/dev/null/x",
    "=",
    "%s",
    "1e999",
)
LAUNCHER_FLAGS: Final = ("config_file",)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a script, and no settings file."""
    monkeypatch.chdir(tmp_path)
    for name in ("HASTEN_HOME", "HF_HOME"):
        monkeypatch.setenv(name, str(tmp_path))
    (tmp_path / "train.py").write_text("")
    return tmp_path


def refused_well(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What is wrong with how `hasten launch` takes these words; nothing if it does well."""
    code = main(["launch", *words])  # an exception that is not ours fails the test
    error_output = capsys.readouterr().err
    if code == 0:
        return ""
    return (
        ""
        if code == 2
        and error_output.startswith("hasten launch: ")
        and len(error_output) > 40
        else f"{words}: {code} {error_output!r}"
    )


def test_every_flag_takes_or_refuses_strange_values(
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = [*LAUNCHER_FLAGS, *(flag_spellings(info)[0] for info in SETTABLE)]
    pairs = zip(flags, islice(cycle(VALUES), len(flags)), strict=True)
    faults = [
        refused_well(["--cpu", f"--{flag}={value}", "--dry-run", "train.py"], capsys)
        for flag, value in pairs
    ]
    assert not [fault for fault in faults if fault]


def test_the_flags_of_a_launch_take_or_refuse_all_of_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for flag in (
        "config_file",
        "num_processes",
        "main_process_port",
        "rdzv_conf",
        "submit_options",
        "tp_size",
    ):
        for value in VALUES:
            assert not refused_well(
                ["--cpu", f"--{flag}={value}", "--dry-run", "train.py"], capsys
            )


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["--"],
        [""],
        ["a\0b"],
        ["--num_processes"],
        ["--no-such", "train.py"],
        ["-z"],
        ["."],
    ],
)
def test_strange_commands_are_refused_in_a_sentence(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert not refused_well(["--dry-run", *words], capsys)


@pytest.mark.parametrize("flag", ["num_processes", "processes_per_machine"])
@pytest.mark.parametrize("extra_flags", [[], ["--dry-run"]])
def test_what_no_machine_holds_is_refused_at_once(
    flag: str, extra_flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        main(["launch", "--cpu", f"--{flag}=1000000000", *extra_flags, "train.py"]) == 2
    )
    assert "is too small" in capsys.readouterr().err


def test_a_job_that_cannot_be_submitted_leaves_no_script(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(folder))
    assert main(["launch", "--submit=slurm", "train.py"]) != 0
    assert "sbatch was not found on PATH" in capsys.readouterr().err
    assert [path.name for path in folder.iterdir()] == ["train.py"]
