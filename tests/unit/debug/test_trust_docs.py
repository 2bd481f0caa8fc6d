"""The page about hangs is right: its snippets run, its settings exist under the names it gives, its numbers are the code's."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hasten import Accelerator
from hasten.config.resolve import resolve
from hasten.debug import ending
from hasten.debug.watchdog import LEAST_S, MOST_S
from hasten.errors import ConfigError

PAGE = (Path(__file__).parents[3] / "docs" / "trust.md").read_text("utf-8")


@pytest.mark.parametrize("code", re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL))
def test_snippets_run(code: str) -> None:
    names: dict[str, object] = {}
    exec(compile(code, "docs/trust.md", "exec"), names)
    made = names["accelerator"]
    assert isinstance(made, Accelerator)
    if "stall" in code:
        assert (made.config.stall, made.config.stall_after_s) == ("report", 120.0)


def test_numbers_of_the_page() -> None:
    assert f"at least {LEAST_S:g} and at most {MOST_S:g}" in PAGE
    assert f"exit code {ending.STALLED}" in PAGE


def test_the_settings_come_from_variables_and_are_checked() -> None:
    config = resolve(env={"HASTEN_STALL_AFTER_S": "120", "HASTEN_STALL": "report"}).config
    assert (config.stall, config.stall_after_s) == ("report", 120.0)
    for name, value in (("stall", "maybe"), ("stall_after_s", 0.1)):
        with pytest.raises(ConfigError, match=name):
            resolve(code={name: value})
