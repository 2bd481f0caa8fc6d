"""`make parity-suites`: lists of passed tests are read and compared, and the page says how they compare."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

TESTS_FOLDER = Path(__file__).parent
REPORT = """<testsuites><testsuite>
<testcase classname="tests.test_a.TestA" name="test_one[&lt;f at 0x7f12&gt;]" time="1"/>
<testcase classname="tests.test_a" name="test_two"><failure message="no">no</failure></testcase>
<testcase classname="tests.test_a" name="test_three"><skipped/></testcase>
<testcase classname="tests.test_a" name="test_four"><error/></testcase>
<testcase classname="tests.test_a" name="test_five"><system-out>said</system-out></testcase>
</testsuite></testsuites>"""


@pytest.fixture
def suites(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """run_suites.py as a module."""
    monkeypatch.syspath_prepend(str(TESTS_FOLDER))
    yield importlib.import_module("run_suites")
    sys.modules.pop("run_suites", None)


def compared(suites: Any, original: set[str], dropin: set[str]) -> dict[str, Any]:
    """Results of one suite, and of one that has no tests."""
    return {
        "peft": suites.Result("1.0", {"original": original, "dropin": dropin}, files=1),
        "trl": suites.Result("2.0"),
    }


def test_only_passed_tests_are_read_from_a_report(suites: Any, tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    assert suites.passed(report) == set()
    report.write_text(REPORT)
    assert suites.passed(report) == {
        "tests.test_a.TestA::test_one[<f at 0x>]",
        "tests.test_a::test_five",
    }


def test_a_test_that_passes_with_the_original_only_needs_a_reason(
    suites: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(suites, "LISTED", {"peft: b": "known"})
    assert suites.unlisted(compared(suites, {"a", "b"}, {"a", "c"})) == []
    assert suites.unlisted(compared(suites, {"a", "b"}, {"b"})) == ["peft: a"]


def test_the_section_is_replaced_and_its_words_stay(
    suites: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(suites, "LISTED", {"peft: b": "known"})
    first = suites.table(compared(suites, {"a", "b"}, {"a", "c", "d"}))
    assert "| peft | 1.0 | 2 | 3 | original 1, dropin 2 |" in first
    assert "| trl | 2.0 | no tests in its sdist or wheel | – | – |" in first
    assert "- peft, `b`: known" in first
    page = suites.with_section("# Clients\n\nwords\n", first)
    described = page.replace(suites.TITLE, f"{suites.TITLE}\n\nHow it is done.")
    replaced_page = suites.with_section(
        described, suites.table(compared(suites, {"a"}, {"a"}))
    )
    assert replaced_page.startswith(
        f"# Clients\n\nwords\n\n{suites.TITLE}\n\nHow it is done.\n\n| Suite |"
    )
    assert (
        "| peft | 1.0 | 1 | 1 | none |" in replaced_page
        and "known" not in replaced_page
    )
    assert (
        suites.with_section(replaced_page, suites.table(compared(suites, {"a"}, {"a"})))
        == replaced_page
    )


def test_every_test_file_is_in_one_job(suites: Any, tmp_path: Path) -> None:
    names = [
        f"tests/inner/test_{number:02}.py" for number in range(suites.TOGETHER)
    ] + ["tests/test_a.py"]
    for name in (*names, "tests/helper.py", "src/test_c.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    jobs = suites.suite_jobs("setfit", tmp_path)
    assert [
        word for job in jobs for word in job.command if word.endswith(".py")
    ] == names
    assert len(jobs) == 2


def test_added_files_are_run_and_see_their_folder(suites: Any, tmp_path: Path) -> None:
    sdist, added = tmp_path / "sdist", tmp_path / "added"
    for name in (
        "sdist/tests/test_trainer.py",
        "added/trl/tests/more/test_dpo_trainer.py",
        "added/peft/tests/test_other.py",
    ):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).touch()
    [job] = suites.suite_jobs("trl", sdist, added, "apart")
    assert job.apart == "apart" and job.name == "tests/more/test_dpo_trainer.py"
    assert (sdist / "tests" / "conftest.py").read_text() == suites.ADDED["trl"][
        "tests/conftest.py"
    ]


def test_the_page_has_every_suite(suites: Any) -> None:
    page = (TESTS_FOLDER.parent / "CLIENTS.md").read_text()
    _, title, section = page.partition(suites.TITLE)
    assert title
    assert re.findall(r"^\| ([\w.-]+) \| \d", section, re.MULTILINE) == [
        suites.SCRIPTS,
        *suites.SUITES,
    ]
