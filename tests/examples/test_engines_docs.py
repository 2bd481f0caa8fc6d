"""The code blocks of docs/deepspeed.md run as they stand, in order, on two processes."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import Any, Final

import pytest

from hasten.extensions.deepspeed.engine import VERSIONS
from hasten.optional import available
from hasten.runtime.context import ProcessContext
from hasten.testing.pool import ranks

PAGE: Final = Path(__file__).parents[2] / "docs" / "deepspeed.md"


@pytest.mark.skipif(
    not available("deepspeed", VERSIONS), reason=f"deepspeed{VERSIONS} is not installed"
)
@ranks(2, timeout_s=110)
def test_the_blocks_run_on_two_processes(ctx: ProcessContext, tmp_path: Path) -> None:
    names: dict[str, Any] = {"__name__": "page"}  # Any: what the page defines
    with contextlib.chdir(tmp_path):
        for block in re.findall(
            r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL
        ):
            exec(compile(block, str(PAGE), "exec"), names)
        assert Path("checkpoint/manifest.json").is_file()
