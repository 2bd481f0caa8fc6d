"""Every benchmark is run by `make bench`, or left out for a reason that its table gives."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


def test_every_script_is_in_the_plan_or_left_out_for_a_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "path", [str(FOLDER), *sys.path])
    plan = runpy.run_path(str(FOLDER / "run_all.py"))
    assert plan["unknown_scripts"]() == []
    named = [planned.script for planned in plan["PLANS"]] + list(plan["NOT_HERE"])
    assert sorted(named) == sorted({path.name for path in FOLDER.glob("*.py")}), (
        "twice, or gone"
    )
