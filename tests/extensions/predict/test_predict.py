"""`hasten predict`: one result per row, in order, the same on any number of processes; complete or absent; goes on after a kill."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

import pytest

from hasten import Accelerator
from hasten.cli.main import main
from hasten.errors import ConfigError, DataError, PeerFailedError
from hasten.extensions.predict.program import predict_file
from hasten.extensions.predict.rows import RowParts, read_rows
from hasten.runtime.context import ProcessContext
from hasten.testing.pool import ranks

MODULE: Final = """
from pathlib import Path
import torch

def double(rows):
    assert torch.is_inference_mode_enabled()
    return [{"row": row["n"], "twice": torch.tensor([2 * row["n"]])} for row in rows]

class Counted:
    def __init__(self, accelerator):
        self.rank = accelerator.process_index
    def __call__(self, rows):
        for row in rows:
            (Path("seen") / f"{row['n']}-{self.rank}").touch()
        if Path("broken").exists() and any(row["n"] == 5 for row in rows):
            raise ValueError("no fifth row")
        return [row["n"] for row in rows]

def short(rows):
    return rows[1:]
"""
SLOW: Final = "import time\ndef work(rows):\n    time.sleep(0.2)\n    return [row['n'] ** 2 for row in rows]\n"


def write_rows(folder: Path, count: int) -> Path:
    """A file of numbered rows."""
    path = folder / "data.jsonl"
    path.write_text("".join(f'{{"n": {number}}}\n' for number in range(count)))
    return path


def prepared(ctx: ProcessContext, folder: Path, count: int) -> tuple[str, Path]:
    """A module of this test's own beside the rows, in the folder that all ranks now work in; the module's name and the rows."""
    name = f"predicted_{abs(hash(str(folder)))}" if ctx.world.rank == 0 else ""
    name = ctx.world.broadcast_object(name)
    if ctx.world.rank == 0:
        (folder / f"{name}.py").write_text(MODULE)
        (folder / "seen").mkdir()
        write_rows(folder, count)
    ctx.world.barrier("written")
    return name, folder / "data.jsonl"


@ranks(1, 2, exhaustive=(4,))
def test_every_row_has_its_line_in_order(ctx: ProcessContext, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        patch.syspath_prepend(str(tmp_path))
        name, data = prepared(ctx, tmp_path, 23)
        for batch_size in (1, 4, 23, 100):
            output = tmp_path / f"out{batch_size}.jsonl"
            summary = predict_file(
                Accelerator(), f"{name}:double", data, output, batch_size
            )
            processes = (
                "1 process" if ctx.world.size == 1 else f"{ctx.world.size} processes"
            )
            assert summary == f"{output}: 23 rows on {processes}"
            rows = [json.loads(line) for line in output.read_text().splitlines()]
            assert rows == [
                {"row": number, "twice": [2 * number]} for number in range(23)
            ]
            assert not output.with_name(f"{output.name}.parts").exists()


@ranks(1, 2)
def test_a_failure_leaves_no_output_and_the_next_start_does_the_rest(
    ctx: ProcessContext, tmp_path: Path
) -> None:
    output = tmp_path / "out.jsonl"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        patch.syspath_prepend(str(tmp_path))
        name, data = prepared(ctx, tmp_path, 12)
        if ctx.world.rank == 0:
            (tmp_path / "broken").touch()
        ctx.world.barrier("broken")
        with pytest.raises((ValueError, PeerFailedError), match="no fifth row"):
            predict_file(Accelerator(), f"{name}:Counted", data, output, 2)
        assert not output.exists()
        ctx.world.barrier("failed")
        if ctx.world.rank == 0:
            (tmp_path / "broken").unlink()
            for seen_file in (tmp_path / "seen").iterdir():
                seen_file.unlink()
        ctx.world.barrier("repaired")
        summary = predict_file(Accelerator(), f"{name}:Counted", data, output, 2)
        assert "parts already existed" in summary
        done = {int(path.name.split("-")[0]) for path in (tmp_path / "seen").iterdir()}
        assert done >= {4, 5}
        assert len(done) < 12, "what was finished is not done again"
        assert [
            json.loads(line)["prediction"] for line in output.read_text().splitlines()
        ] == list(range(12))


@ranks(1)
def test_parts_of_another_job_are_not_mixed_in(
    ctx: ProcessContext, tmp_path: Path
) -> None:
    row_parts = RowParts(tmp_path / "out.jsonl", 5, 2)
    assert row_parts.begin_job({"data": "a"}) == ""
    row_parts.finish_part(0, [1, 2])
    assert row_parts.missing_parts() == [1, 2]
    assert row_parts.begin_job({"data": "a"}) == ""
    assert row_parts.missing_parts() == [1, 2]
    assert row_parts.begin_job({"data": "b"}) == "data"
    assert row_parts.missing_parts() == [0, 1, 2]


@pytest.mark.parametrize("num_rows", [0, 1, 7, 512, 513, 5000])
@pytest.mark.parametrize("batch_size", [1, 3, 64])
def test_parts_hold_every_row_once_and_are_not_too_many(
    tmp_path: Path, num_rows: int, batch_size: int
) -> None:
    row_parts = RowParts(tmp_path / "out.jsonl", num_rows, batch_size)
    batches = [
        batch
        for part_index in range(row_parts.count)
        for batch in row_parts.list_batches(part_index)
    ]
    assert [row for batch in batches for row in batch] == list(range(num_rows))
    assert row_parts.count <= 512
    assert all(len(batch) == batch_size for batch in batches[:-1]), (
        "batches do not depend on how parts are cut"
    )


@ranks(2)
def test_another_number_of_results_is_an_error_on_every_rank(
    ctx: ProcessContext, tmp_path: Path
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        patch.syspath_prepend(str(tmp_path))
        name, data = prepared(ctx, tmp_path, 4)
        with pytest.raises(
            (DataError, PeerFailedError), match="1 results were returned for the 2 rows"
        ):
            predict_file(
                Accelerator(), f"{name}:short", data, tmp_path / "out.jsonl", 2
            )
        with pytest.raises(
            (ConfigError, PeerFailedError),
            match=r"has no function 'nothing'; it has .*double",
        ):
            predict_file(
                Accelerator(), f"{name}:nothing", data, tmp_path / "out.jsonl", 2
            )


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "processes", [1, pytest.param(2, marks=pytest.mark.exhaustive)]
)
def test_killed_and_started_again_it_ends_with_the_same_file(
    tmp_path: Path, processes: int
) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    write_rows(tmp_path, 40)
    words = [
        "predict",
        "slow:work",
        "data.jsonl",
        "-o",
        "out.jsonl",
        "--batch-size",
        "2",
        "--cpu",
        "--num_processes",
        str(processes),
    ]
    command = [sys.executable, "-m", "hasten.cli.main", *words]
    with subprocess.Popen(
        command,
        cwd=tmp_path,
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as job:
        deadline = time.monotonic() + 90
        while len(list(tmp_path.glob("out.jsonl.parts/*.jsonl"))) < 3:
            assert job.poll() is None, "it ended before it could be killed"
            assert time.monotonic() < deadline
            time.sleep(0.05)
        os.killpg(job.pid, signal.SIGKILL)
    assert not (tmp_path / "out.jsonl").exists()
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert re.search(rf"out.jsonl: 40 rows on {processes} process(es)?; ", done.stdout)
    assert "of 20 parts already existed" in done.stdout
    assert [
        json.loads(line)["prediction"]
        for line in (tmp_path / "out.jsonl").read_text().splitlines()
    ] == [number**2 for number in range(40)]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nothing", "data.jsonl", "-o", "o.jsonl"], "is not module:function"),
        (["a:b", "absent.jsonl", "-o", "o.jsonl"], "DATA=absent.jsonl does not exist"),
        (["a:b", "data.jsonl", "-o", "o.csv"], "does not end in .jsonl"),
        (
            ["a:b", "data.jsonl", "-o", "o.jsonl", "--batch-size", "0"],
            "set it to 1 or more",
        ),
    ],
)
def test_what_cannot_work_is_refused_before_anything_starts(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path, 1)
    assert main(["predict", *words]) == 2
    assert message in capsys.readouterr().err


def test_files_of_every_kind_have_rows(tmp_path: Path) -> None:
    from hasten.extensions.predict.rows import read_rows

    kinds = {
        "a.csv": "text,label\nhello,1\n",
        "a.tsv": "text\tlabel\nhello\t1\n",
        "a.jsonl": '{"text": "hello", "label": "1"}\n\n',
    }
    for name, content in kinds.items():
        (tmp_path / name).write_text(content)
        assert list(read_rows(tmp_path / name)) == [{"text": "hello", "label": "1"}]
    (tmp_path / "a.txt").write_text("hello\n")
    assert list(read_rows(tmp_path / "a.txt")) == [{"text": "hello"}]
    (tmp_path / "bad.jsonl").write_text('{"a": 1}\n[1]\n')
    with pytest.raises(DataError, match=r"bad.jsonl, line 2 is no JSON object"):
        read_rows(tmp_path / "bad.jsonl")
    (tmp_path / "a.parquet").write_text("")
    with pytest.raises(ConfigError, match="convert it to JSON lines"):
        read_rows(tmp_path / "a.parquet")


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("rows.csv", b"a,b\n1,2\n1,2,3\n", "line 3 has more cells than the 2 columns"),
        ("rows.csv", b"a,b\n" + b'"' + b"x" * 200_000 + b'"', "line 2 cannot be read"),
        ("rows.txt", b"fine\n\xff\n", "not UTF-8 text .byte 0xff at 5"),
        ("rows.tsv", b"a\n\xff\n", "save it as UTF-8"),
    ],
)
def test_rows_that_cannot_be_read_are_named(
    tmp_path: Path, name: str, content: bytes, why: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=why):
        read_rows(tmp_path / name)
