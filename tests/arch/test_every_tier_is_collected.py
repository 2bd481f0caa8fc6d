"""`make test` runs every tier: a folder that pytest passes over in silence would look like a green one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]


def test_every_file_of_tests_is_collected() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    collected = {line.split("::")[0] for line in done.stdout.splitlines() if "::" in line}
    there = {
        str(path.relative_to(ROOT)) for top in ("tests", "dropin/tests") for path in (ROOT / top).rglob("test_*.py")
    }
    assert there - collected == set(), done.stderr
