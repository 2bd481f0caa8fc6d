"""Commands misused as a newcomer may: one sentence that names the command once, before any process is started."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from hasten.cli.main import commands, main
from hasten.errors import DataError
from hasten.extensions.predict.program import predict_batch


@pytest.mark.parametrize(
    "words",
    [
        ["test", "train.py"],
        ["predict"],
        ["config", "show", "extra"],
        ["launch", "--tee"],
    ],
)
def test_a_usage_error_names_the_command_once(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    error_output = capsys.readouterr().err
    assert error_output.startswith(f"hasten {words[0]}")
    assert ": hasten" not in error_output


@pytest.mark.parametrize("name", ["rows.parquet", "rows.json", "rows"])
def test_predict_refuses_another_kind_of_file_before_it_starts(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / name
    data.write_text("")
    assert (
        main(
            ["predict", "module:function", str(data), "-o", str(tmp_path / "out.jsonl")]
        )
        == 2
    )
    error_output = capsys.readouterr().err
    assert name in error_output
    assert ".jsonl" in error_output


@pytest.mark.parametrize("result", [None, 3])
def test_a_function_that_returns_no_list_is_told_so(result: int | None) -> None:
    with pytest.raises(
        DataError,
        match="was returned instead of results; return a list with one result per row",
    ) as caught:
        predict_batch(lambda rows: result, [{"text": "a"}], range(1))  # type: ignore[arg-type, return-value]
    assert caught.value.__notes__ == ["while predicting rows 0 to 0"]


@pytest.mark.parametrize(
    ("flag", "setting"),
    [
        ("--nproc", "--num_processes"),
        ("--nproc-per-node", "--processes_per_machine"),
        ("--master_addr", "--main_process_ip"),
    ],
)
def test_flags_of_other_launchers_are_translated(
    flag: str, setting: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["launch", flag, "2", "train.py"]) == 2
    assert f"did you mean {setting}?" in capsys.readouterr().err.replace(
        "-per-", "_per_"
    ).replace("processes-", "processes_")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_command_is_completed(
    shell: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["completion", shell]) == 0
    script, errors = capsys.readouterr()
    assert not errors
    assert all(re.search(rf"\b{name}\b", script) for name in commands())
    flags = ("num_processes", "kubernetes_image", "global-batch", "budget")
    assert all(re.search(rf"(--|-l ){flag}\b", script) for flag in flags)
    if shell != "bash":
        return
    question = f"{script}\nCOMP_WORDS=(hasten launch --num_p) COMP_CWORD=2; _hasten; echo ${{COMPREPLY[@]}}"
    completed = subprocess.run(
        ["bash", "-c", question], capture_output=True, text=True, check=True
    )
    assert completed.stdout.split() == ["--num_processes"]
