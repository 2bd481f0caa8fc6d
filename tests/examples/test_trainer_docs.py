"""The code blocks of docs/trainer.md and docs/report.md run as they stand, in order; the report of the second is drawn."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import Any, Final

import pytest

from hasten.cli.main import main
from hasten.runtime.context import ProcessContext
from hasten.testing.pool import ranks

DOCS: Final = Path(__file__).parents[2] / "docs"


@ranks(1)
@pytest.mark.parametrize(("page", "num_blocks"), [("trainer.md", 3), ("report.md", 1)])
def test_blocks_run_in_order(
    ctx: ProcessContext, tmp_path: Path, page: str, num_blocks: int
) -> None:
    blocks = re.findall(
        r"```python\n(.*?)```", (DOCS / page).read_text("utf-8"), re.DOTALL
    )
    assert len(blocks) == num_blocks
    names: dict[str, Any] = {"__name__": "page"}  # Any: what the page defines
    with contextlib.chdir(tmp_path):
        for block in blocks:
            exec(compile(block, str(DOCS / page), "exec"), names)
        if page == "report.md":
            assert main(["report", "runs/line", "-o", "line.html"]) == 0
            assert '"title":"loss"' in Path("line.html").read_text("utf-8")
