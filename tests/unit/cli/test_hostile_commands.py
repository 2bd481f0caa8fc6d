"""Commands that make no sense: each ends with exit code 2 and one sentence that names the argument, without a traceback."""

from __future__ import annotations

from pathlib import Path

import pytest

from hasten.cli.main import main
from hasten.errors import ConfigError, DataError
from hasten.extensions.predict.rows import RowParts

PLAN = ["plan", "train.py", "--gpu", "h200", "--global-batch", "8"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a script and an empty folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    (tmp_path / "empty").mkdir()
    return tmp_path


@pytest.mark.parametrize(
    ("words", "expected_words"),
    [
        (["launch", "empty"], "'empty' is a folder without a __main__.py"),
        (
            [
                "launch",
                "--submit=slurm",
                "--submit_options=time=1\n#SBATCH --x",
                "--dry-run",
                "train.py",
            ],
            "end its #SBATCH line",
        ),
        (["launch", "--cpu", "--gpu_ids=-1", "train.py"], "devices are counted from 0"),
        (
            ["launch", "--num_cpu_threads_per_process=1000000000", "train.py"],
            "give at most 4096",
        ),
        (["launch", "--num_machines=1000000000", "train.py"], "give at most 1000000"),
        (
            ["launch", "--gradient_accumulation_steps=99999999", "train.py"],
            "give at most 1000000",
        ),
        (["launch", "--project_dir=a\0b", "train.py"], "NUL character"),
        (["predict"], "hasten predict: the following arguments are required"),
        (
            ["predict", "a:b", "train.py", "-o", "o.jsonl", "--batch-size=x"],
            "'x' is not an integer from 0",
        ),
        (["top", "--interval=-1"], "'-1' is not a number of seconds above 0"),
        (["tune", "train.py", "--updates=0"], "'0' is not an integer from 2"),
        ([*PLAN, "--gpus=0"], "'0' is not an integer from 1 to 1000000"),
        (
            [*PLAN, "--gpus=1000000000"],
            "'1000000000' is not an integer from 1 to 1000000",
        ),
    ],
)
def test_a_command_that_makes_no_sense_is_refused_in_words(
    words: list[str], expected_words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = main(words)
    except SystemExit as end:  # argparse leaves by itself
        code = end.code if isinstance(end.code, int) else 1
    error_output = capsys.readouterr().err
    assert code == 2, error_output
    assert expected_words in error_output
    assert "Traceback" not in error_output


def test_an_output_that_cannot_be_written_is_named(folder: Path) -> None:
    (folder / "file").write_text("")
    with pytest.raises(
        ConfigError, match=r"--output=file/out\.jsonl cannot be written"
    ):
        RowParts(Path("file/out.jsonl"), 1, 1).begin_job({})


def test_a_record_that_was_cut_off_is_another_job(folder: Path) -> None:
    row_parts = RowParts(folder / "out.jsonl", 1, 1)
    assert row_parts.begin_job({"target": "a"}) == ""
    for record in row_parts.folder.iterdir():
        record.write_text('{"tar')
    assert row_parts.begin_job({"target": "a"}) == "target"


def test_a_result_that_json_does_not_know_is_named(folder: Path) -> None:
    row_parts = RowParts(folder / "out.jsonl", 1, 1)
    row_parts.begin_job({})
    with pytest.raises(DataError, match=r"a result holds a object.*return numbers"):
        row_parts.finish_part(0, [object()])
