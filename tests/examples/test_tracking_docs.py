"""The code blocks of docs/tracking.md run as they stand, in order."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Final

PAGE: Final = Path(__file__).parents[2] / "docs" / "tracking.md"


def test_blocks_run_in_order(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    assert len(blocks) == 5
    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", "-c", "\n".join(blocks)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "epoch 1 32/32 100% | loss" in done.stderr
