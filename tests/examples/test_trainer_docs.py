"""The code blocks of docs/trainer.md and docs/report.md run as they stand, in order; the report of the second is drawn."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

DOCS: Final = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize(("page", "num_blocks"), [("trainer.md", 3), ("report.md", 1)])
def test_blocks_run_in_order(tmp_path: Path, page: str, num_blocks: int) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / page).read_text("utf-8"), re.DOTALL)
    assert len(blocks) == num_blocks
    if page == "report.md":
        blocks.append(
            'from hasten.cli.main import main\nassert main(["report", "runs/line", "-o", "line.html"]) == 0\n'
        )
    command = [sys.executable, "-W", "error::UserWarning", "-c", "\n".join(blocks)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    if page == "report.md":
        assert '"title":"loss"' in (tmp_path / "line.html").read_text("utf-8")
