"""Every Python block of the documentation runs as it stands: a page's blocks in order, in one namespace, on one and two ranks.

What a page needs but does not show stands in front of a block as `<!-- run first: … -->`; a block that cannot run here is marked
`<!-- not run: the reason -->`.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest

from hasten.cli.main import main
from hasten.runtime.context import ProcessContext
from hasten.testing.pool import ranks

PRELOAD: Final = ("transformers.modeling_utils", "datasets", "sklearn.datasets")

DOCS: Final = Path(__file__).parents[2] / "docs"
BLOCK: Final = re.compile(
    r"(?:^<!-- (?P<note>run first|not run):(?P<said>.*?)-->\n+)?^```python(?P<title>[^\n]*)\n(?P<code>.*?)^```",
    re.MULTILINE | re.DOTALL,
)
INCLUDED: Final = re.compile(r'^--8<-- "(.+)"$', re.MULTILINE)
OWN_TESTS: Final = {
    "deepspeed.md": "test_engines_docs.py",
    "parallel.md": "test_parallel_docs.py",
    "tracking.md": "test_tracking_docs.py",
    "trainer.md": "test_trainer_docs.py",
    "report.md": "test_trainer_docs.py",
}
"""Pages whose blocks another test runs, because it also looks at what they leave."""
OWN_PROCESS: Final = ("launch.md", "testing.md", "quickstart.md")
"""Pages that start processes themselves, or are scripts."""


@dataclass(frozen=True, slots=True)
class Block:
    """A block of code: what runs before it, its text, why it does not run."""

    line: int
    setup: str
    code: str
    reason: str


def blocks(page: Path) -> list[Block]:
    """The Python blocks of a page, without those that include a file."""
    text = page.read_text("utf-8")
    page_blocks = []
    for match in BLOCK.finditer(text):
        line = text[: match.start("code")].count("\n")
        comment = match["said"] or ""
        setup, reason = (
            (comment, "")
            if match["note"] == "run first"
            else ("", " ".join(comment.split()))
        )
        assert match["note"] != "not run" or reason, (
            f"{page.name}:{line}: a block that is not run needs a reason"
        )
        page_blocks.append(Block(line, setup, match["code"], reason))
    return [block for block in page_blocks if not INCLUDED.search(block.code)]


def pages() -> list[str]:
    """The pages with Python blocks, from the folder of the documentation."""
    return [
        path.relative_to(DOCS).as_posix()
        for path in sorted(DOCS.rglob("*.md"))
        if "```python" in path.read_text("utf-8")
    ]


POOLED: Final = [
    page for page in pages() if page not in OWN_TESTS and page not in OWN_PROCESS
]


@contextlib.contextmanager
def working_in(folder: Path) -> Iterator[None]:
    """A block of work in a folder, with the environment as it was afterwards."""
    previous_folder, variables = Path.cwd(), dict(os.environ)
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(previous_folder)
        os.environ.clear()
        os.environ.update(variables)


def run_blocks(page: str) -> None:
    """Run the blocks of a page in this process."""
    names: dict[str, Any] = {"__name__": "page"}  # Any: what the page defines
    for block in blocks(DOCS / page):
        if not block.reason:
            exec(
                compile(block.setup, f"{page}: before line {block.line}", "exec"), names
            )
            exec(
                compile("\n" * block.line + block.code, str(DOCS / page), "exec"), names
            )


# importing transformers takes long on a busy machine
@ranks(2, timeout_s=110, exhaustive=(1,))
@pytest.mark.parametrize("page", POOLED)
def test_blocks_run_in_order(ctx: ProcessContext, tmp_path: Path, page: str) -> None:
    with working_in(tmp_path):
        run_blocks(page)


def run_script(folder: Path, code: str, *command: str) -> str:
    """What a script printed in a process of its own."""
    (folder / "train.py").write_text(code, "utf-8")
    done = subprocess.run(
        [sys.executable, *command, "train.py"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def joined(page: str) -> str:
    """The blocks of a page as one script."""
    return "\n".join(
        f"{block.setup}\n{block.code}"
        for block in blocks(DOCS / page)
        if not block.reason
    )


@pytest.mark.exhaustive
def test_the_notebook_launcher_block_runs(tmp_path: Path) -> None:
    assert "2 processes" in run_script(tmp_path, joined("launch.md"))


@pytest.mark.exhaustive
def test_the_tests_of_the_testing_page_pass_and_its_script_runs(tmp_path: Path) -> None:
    *tests, script = blocks(DOCS / "testing.md")
    (tmp_path / "test_page.py").write_text(
        "\n\n".join(block.code for block in tests), "utf-8"
    )
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "test_page.py",
    ]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stdout
    assert run_script(tmp_path, script.code).splitlines() == [
        "[10.0, 10.0]",
        "[6.0, 6.0, 6.0, 6.0]",
    ]


def test_the_quickstart_runs_as_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    launch = ("-m", "hasten.cli.main", "launch", "--cpu", "--num_processes", "2")
    printed = run_script(tmp_path, joined("quickstart.md"), *launch)
    right = [
        int(number) for number in re.findall(r"epoch \d: (\d+) of 256 right", printed)
    ]
    assert len(right) == 5
    assert right[-1] > 230
    monkeypatch.chdir(tmp_path)
    for command in (
        ["report", "runs/first", "-o", "runs/first.html"],
        ["ckpt", "list", "runs/first"],
    ):
        assert f"hasten {' '.join(command)}" in (DOCS / "quickstart.md").read_text(
            "utf-8"
        )
        assert main(command) == 0
    assert "checkpoint_4" in capsys.readouterr().out
    assert (tmp_path / "runs" / "first.html").is_file()


def test_the_quickstart_goes_on_where_it_stopped(tmp_path: Path) -> None:
    script = joined("quickstart.md").replace(
        "for epoch in accelerator",
        "accelerator.load_state(must_exist=False)\nfor epoch in accelerator",
    )
    saved = "    accelerator.save_state()\n"
    assert script.count(saved) == 1
    first = run_script(
        tmp_path,
        script.replace(saved, f"{saved}    if epoch == 2:\n        raise SystemExit\n"),
    )
    second = run_script(tmp_path, script)
    assert re.findall(r"epoch (\d):", first + second) == list("01234")


@pytest.mark.parametrize("page", pages())
def test_included_files_are_run_by_other_tests(page: str) -> None:
    root = DOCS.parent
    for name in INCLUDED.findall((DOCS / page).read_text("utf-8")):
        assert (root / name).is_file(), name
        runner = (
            "dropin/tests/test_tutorials.py"
            if name.startswith("dropin/")
            else "tests/examples/test_examples.py"
        )
        script_name = Path(name).stem if name.startswith("dropin/") else Path(name).name
        assert script_name in (root / runner).read_text("utf-8"), (
            f"{name} is run by no test"
        )


def test_every_page_has_its_test() -> None:
    assert {*OWN_TESTS, *OWN_PROCESS} <= set(pages())
    for page, test in OWN_TESTS.items():
        assert page in (Path(__file__).parent / test).read_text("utf-8")


def test_a_block_without_a_reason_is_seen(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("<!-- not run: -->\n```python\nx\n```\n")
    with pytest.raises(AssertionError, match="needs a reason"):
        blocks(page)
    page.write_text("<!-- run first:\ny = 1\n-->\n```python\nx = y\n```\n")
    assert blocks(page) == [Block(4, "\ny = 1\n", "x = y\n", "")]
