"""`make test` runs every tier: a folder that pytest passes over in silence would look like a green one."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
# pytest's own rules decide which files are test modules; none of them is imported, which takes most of a collection.
COLLECT: Final = """
import sys
import pytest

class Found:
    def pytest_pycollect_makemodule(self, module_path, parent):
        print("found", module_path)
        return Unread.from_parent(parent, path=module_path)

class Unread(pytest.Module):
    def collect(self):
        return []

pytest.main(["--collect-only", "-q", "-p", "no:cacheprovider"], plugins=[Found()])
"""


def test_every_file_of_tests_is_collected() -> None:
    completed = subprocess.run(
        [sys.executable, "-c", COLLECT],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    collected = {
        Path(line.removeprefix("found "))
        for line in completed.stdout.splitlines()
        if line.startswith("found ")
    }
    test_files = {
        path
        for top in ("tests", "dropin/tests")
        for path in (ROOT / top).rglob("test_*.py")
    }
    assert test_files - collected == set(), completed.stdout[-2000:] + completed.stderr
    assert {path.name for path in test_files if not has_tests(path)} == set(), (
        "files without a test"
    )


def has_tests(path: Path) -> bool:
    """Whether a file defines something that pytest takes for a test."""
    body = ast.parse(path.read_text("utf-8")).body
    return any(
        isinstance(node, ast.FunctionDef | ast.ClassDef)
        and node.name.lower().startswith("test")
        for node in body
    )
