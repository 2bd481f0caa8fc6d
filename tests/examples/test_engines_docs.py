"""The code blocks of docs/engines.md run as they stand, launched on two processes."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from hasten.optional import available
from hasten.strategies.deepspeed_engine import VERSIONS

PAGE: Final = Path(__file__).parents[2] / "docs" / "engines.md"


@pytest.mark.skipif(not available("deepspeed", VERSIONS), reason=f"deepspeed{VERSIONS} is not installed")
def test_the_blocks_run_launched_on_two_processes(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    (tmp_path / "train.py").write_text("\n".join(blocks))
    done = subprocess.run(
        [sys.executable, "-m", "hasten.cli.main", "launch", "--cpu", "--num_processes=2", "train.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "checkpoint" / "manifest.json").is_file()
