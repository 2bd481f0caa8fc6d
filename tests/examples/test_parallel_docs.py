"""The code blocks of docs/parallel.md run as they stand, on two processes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from hasten.runtime.context import ProcessContext
from hasten.testing.pool import ranks

PAGE: Final = Path(__file__).parents[2] / "docs" / "parallel.md"


@ranks(2)
def test_blocks_run(ctx: ProcessContext) -> None:
    # a comment says: not run
    blocks = re.findall(
        r"(?<!-->\n)```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL
    )
    assert len(blocks) >= 5
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), {"__name__": "page"})
