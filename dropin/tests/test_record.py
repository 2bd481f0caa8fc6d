"""`make parity`: every client is recorded, and the table says what happened to it."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import util
from pathlib import Path
from typing import Any

import pytest

TESTS_FOLDER = Path(__file__).parent
SIDES = ("original", "dropin")
# what they share, and DeepSpeed, which the original does not start on the CPU
NO_CLIENTS = ("outcome", "engine")


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """record.py as a module."""
    loaded_modules = set(sys.modules)
    monkeypatch.syspath_prepend(str(TESTS_FOLDER))
    yield importlib.import_module("record")
    for name in {"record", "run_parity", "warm"} - loaded_modules:
        sys.modules.pop(name, None)


def put(recorder: Any, out: Path, job: Any, *results: Any) -> Any:
    """Recordings of both sides, and how they compare; None leaves a side without."""
    for side, result in zip(SIDES, results, strict=True):
        file = out / side / job.file
        file.parent.mkdir(parents=True, exist_ok=True)
        if result is not None:
            file.write_text(result if isinstance(result, str) else json.dumps(result))
    return recorder.compared(job, out, SIDES)


def test_every_client_is_recorded_and_described(recorder: Any) -> None:
    scripts = {path.stem for path in (TESTS_FOLDER / "clients").glob("*.py")}
    assert set(recorder.CLIENTS) == scripts - set(NO_CLIENTS)
    page = (TESTS_FOLDER.parent / "CLIENTS.md").read_text()
    assert set(re.findall(r"`tests/clients/(\w+)\.py`", page)) == scripts - {"outcome"}
    pinned = {
        line.partition("==")[0].lower().replace("_", "-")
        for line in recorder.CONSTRAINTS.read_text().splitlines()
    }
    assert {
        distribution
        for client in recorder.CLIENTS.values()
        for distribution in client.apart
    } <= pinned


def test_listed_differences_name_recordings_that_are_made(recorder: Any) -> None:
    job_names = [
        job.name
        for job in recorder.jobs(
            [recorder.SCRIPTS, *recorder.CLIENTS, recorder.TUTORIALS]
        )
    ]
    assert len(job_names) == len(set(job_names))
    assert set(recorder.EXPLAINED) <= set(job_names)
    assert {job.part for job in recorder.jobs(["lora", "parity"])} == {"lora", "parity"}


def test_the_table_tells_outcomes_apart(recorder: Any, tmp_path: Path) -> None:
    def verdict(job: Any) -> Any:
        match job.part:
            case "denoising":
                return put(
                    recorder,
                    tmp_path,
                    job,
                    {"each": 1.0, "split": 1.0},
                    {"each": 1.0, "split": 2.0},
                )
            case "lora":
                return put(
                    recorder, tmp_path, job, {"loss": [1.0, 2.0]}, {"loss": [1.0, 2.1]}
                )
            case "sft":
                return put(
                    recorder,
                    tmp_path,
                    job,
                    {"loss": 1.0},
                    None if job.processes == 2 else {"loss": 1.0 + 1e-8},
                )
            case "preferences":
                return put(
                    recorder,
                    tmp_path,
                    job,
                    {"dpo": 1.0, "kto": {"error": "no"}},
                    {"dpo": 1.0, "kto": {"error": "no"}},
                )
            case "tutorials":
                return put(
                    recorder,
                    tmp_path,
                    job,
                    "loss 1.0\n",
                    f"loss {2.0 if job.name == 'gan_2' else 1.0}\n",
                )
        raise AssertionError(job)

    todo = recorder.jobs(
        ["preferences", "denoising", "lora", "sft", "judging", "tutorials"]
    )
    verdicts = {job: verdict(job) for job in todo if job.part != "judging"}
    missing = {"judging": {"original": ["lm_eval"], "dropin": []}}
    rows = recorder.table(todo, verdicts, missing)
    assert rows[2:] == [
        "| preferences | equal; on both sides an error: kto | equal; on both sides an error: kto |",
        "| denoising | differs in 1 place | equal but for what is listed: split |",
        "| lora | differs in 1 place | differs in 1 place |",
        "| sft | equal | failed: dropin sft_2 |",
        "| judging | not installed: lm_eval (original) | not installed: lm_eval (original) |",
        "| tutorials | equal | differs in 1 place |",
        "",
        f"- denoising_2, split: {recorder.EXPLAINED['denoising_2']['split']}",
    ]


def test_the_page_shows_the_newest_releases(recorder: Any, tmp_path: Path) -> None:
    todo = recorder.jobs(["lora", "sentences"])
    results = {
        "lora_1": ({"loss": 1.0}, {"loss": 1.0}),
        "lora_2": ({"loss": 1.0}, {"loss": 2.0}),
    }
    verdicts = {
        job: put(recorder, tmp_path, job, *results[job.name])
        for job in todo
        if job.part == "lora"
    }
    missing = {"sentences": {"dropin": ["sentence_transformers"]}}
    cells = recorder.newest_cells(todo, verdicts, missing, {"peft": "9.9"})
    assert cells == {
        "lora": "9.9: equal; on 2 processes differs in 1 place",
        "sentences": "no version: not installed: sentence_transformers (dropin)",
    }
    page_text = (TESTS_FOLDER.parent / "CLIENTS.md").read_text()
    changed = [
        (old, new)
        for old, new in zip(
            page_text.splitlines(),
            recorder.with_newest(page_text, cells).splitlines(),
            strict=True,
        )
        if old != new
    ]
    assert len(changed) == 2
    assert (
        "| 9.9: equal; on 2 processes differs in 1 place | `tests/clients/lora.py` |"
        in changed[0][1]
    )
    assert all(len(old.split("|")) == len(new.split("|")) for old, new in changed)


def test_a_script_is_recorded_or_leaves_its_log(
    recorder: Any, tmp_path: Path, warm: Any
) -> None:
    lane = recorder.Lane(
        "dropin",
        sys.executable,
        tmp_path / "dropin",
        tmp_path / "work",
        tmp_path / "apart",
    )
    (tmp_path / "apart" / "lora").mkdir(parents=True)
    (tmp_path / "apart" / "lora" / "only_here.py").write_text("NUMBER = 5\n")
    script = tmp_path / "small.py"
    script.write_text(
        "import json, os, sys\n"
        "import only_here\n"
        "if os.environ.get('RANK', '0') == '0':\n"
        "    json.dump({'number': only_here.NUMBER, 'world': os.environ['WORLD_SIZE']}, open(sys.argv[2], 'w'))\n"
    )
    job = recorder.Job("lora", script, 2)
    assert not lane.record(warm, job).failed
    assert json.loads((tmp_path / "dropin" / "small_2.json").read_text()) == {
        "number": 5,
        "world": "2",
    }
    script.write_text("raise RuntimeError('out of luck')\n")
    (tmp_path / "work" / "small_2").rename(tmp_path / "work" / "earlier")
    assert lane.record(warm, job).failed
    verdict = recorder.compared(job, tmp_path, ["dropin"])
    assert "out of luck" in verdict.failed["dropin small_2"].read_text()


def test_what_cannot_be_installed_is_named_and_no_error(tmp_path: Path) -> None:
    if util.find_spec("pytorch_accelerated"):
        pytest.skip("pytorch-accelerated is installed")
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    sides = [
        "--original",
        sys.executable,
        "--dropin",
        sys.executable,
        "--apart",
        str(tmp_path / "apart"),
    ]
    done = subprocess.run(
        [
            sys.executable,
            str(TESTS_FOLDER / "record.py"),
            str(tmp_path / "out"),
            *sides,
            "--only",
            "accelerated",
        ],
        env={
            **env,
            "PIP_NO_INDEX": "1",
            "PIP_FIND_LINKS": "",
            "PIP_CONFIG_FILE": os.devnull,
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "not installed: " in done.stdout
    cell = "not installed: pytorch_accelerated (original, dropin)"
    assert (
        f"| accelerated | {cell} | {cell} |"
        in (tmp_path / "out" / "table.md").read_text()
    )
    assert json.loads((tmp_path / "out" / "dropin" / "versions.json").read_text())[
        "torch"
    ]
