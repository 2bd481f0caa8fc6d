"""Every table of measured numbers in the pages is the one that benchmarks/results give."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def published(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setattr(sys, "path", [str(ROOT / "benchmarks"), *sys.path])
    return runpy.run_path(str(ROOT / "benchmarks" / "published.py"))


def test_pages_show_what_was_measured(published: dict[str, Any]) -> None:
    for table in published["TABLES"]:
        page = (ROOT / table.page).read_text(encoding="utf-8")
        marked_table = published["found_in"](page, table.name)
        assert marked_table is not None, f"{table.page} has no mark of {table.name!r}"
        assert marked_table[0] == published["format_block"](table), (
            f"{table.page}: {table.name!r} differs from the results; run python benchmarks/published.py --write"
        )


def test_the_picture_shows_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(ROOT / "benchmarks"), *sys.path])
    headline = runpy.run_path(str(ROOT / "benchmarks" / "headline.py"))
    assert headline["drawn_in"](headline["PICTURE"]) == headline["list_panels"](), (
        "run python benchmarks/headline.py"
    )


def test_every_run_names_its_commit_machine_and_date(published: dict[str, Any]) -> None:
    for file in sorted((ROOT / "benchmarks" / "results").glob("*.json")):
        for run in published["read_runs"](file.stem):
            missing = [
                key
                for key in ("setting", "date", "commit", "hardware", "found", "page")
                if key not in run
            ]
            assert not missing, f"{file.name}: a run has no {missing}"


def test_pages_of_results_are_those_of_their_numbers(published: dict[str, Any]) -> None:
    recording = sys.modules["recording"]
    for file in sorted((ROOT / "benchmarks" / "results").glob("*.json")):
        page_text = recording.page_of(file.stem, published["read_runs"](file.stem))
        assert file.with_suffix(".md").read_text(encoding="utf-8") == page_text, (
            f"{file.stem}.md was edited by hand"
        )


def test_one_command_measures_every_table_of_a_gpu_again(
    published: dict[str, Any],
) -> None:
    run_all = runpy.run_path(str(ROOT / "benchmarks" / "run_all.py"))
    measured = {Path(plan.script).stem for plan in run_all["CUDA_PLANS"]}
    for table in published["TABLES"]:
        for name, run in zip(table.names(), table.runs(), strict=True):
            if not run["hardware"].startswith("CPU"):
                assert name in measured, (
                    f"`make bench-cuda` does not run {name}, which {table.page} shows"
                )
