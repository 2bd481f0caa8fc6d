"""The page about hangs is right: its snippets run, its settings exist under the names it gives, its numbers are the code's."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest

from hasten import Accelerator
from hasten.config.resolve import resolve
from hasten.errors import ConfigError
from hasten.extensions.divergence.divergence import Cause
from hasten.extensions.watch import observe as ending
from hasten.extensions.watch.watchdog import LEAST_S, MOST_S

SNIPPETS: dict[str, dict[str, object]] = {
    'trust=TrustSettings(divergence_ignore=["*.rank_local_*", "codebook.usage"])': {
        "divergence": "stop",
        "divergence_every": 100,
        "divergence_ignore": ("*.rank_local_*", "codebook.usage"),
    },
    'trust=TrustSettings(numbers="skip", numbers_spike=20)': {
        "numbers": "skip",
        "numbers_spike": 20.0,
    },
    # a step that may run out of memory
    "gradient_accumulation_steps=2": {"numbers": "report"},
}
"""What each further snippet asks for, and what the settings then hold."""
PAGE = (Path(__file__).parents[3] / "docs" / "trust.md").read_text("utf-8")


@pytest.mark.parametrize("code", re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL))
def test_snippets_run(
    code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    exec(compile(code, "docs/trust.md", "exec"), names)
    accelerator = names["accelerator"]
    assert isinstance(accelerator, Accelerator)
    arguments = set(re.findall(r"Accelerator\((.*)\)", code))
    assert arguments in (
        {'trust=TrustSettings(stall="report", stall_after_s=120)'},
        *({argument_text} for argument_text in SNIPPETS),
    )
    if 'stall="report"' in code:
        assert (
            accelerator.config.trust.stall,
            accelerator.config.trust.stall_after_s,
        ) == (
            "report",
            120.0,
        )
    for snippet, values in SNIPPETS.items():
        if snippet in code:
            assert {
                name: getattr(accelerator.config.trust, name) for name in values
            } == values


def test_numbers_of_the_page() -> None:
    assert f"at least {LEAST_S:g} and at most {MOST_S:g}" in PAGE
    assert f"exit code {ending.STALLED}" in PAGE


def test_the_settings_come_from_variables_and_are_checked() -> None:
    config = resolve(
        env={"HASTEN_TRUST_STALL_AFTER_S": "120", "HASTEN_TRUST_STALL": "report"}
    ).config
    assert (config.trust.stall, config.trust.stall_after_s) == ("report", 120.0)
    for name, value in (("stall", "maybe"), ("stall_after_s", 0.1)):
        with pytest.raises(ConfigError, match=name):
            resolve(code={"trust": {name: value}})


def test_the_causes_of_the_page_are_those_of_the_code() -> None:
    listed = re.findall(
        r"^\| `(\w+)` \| ",
        PAGE.split("| cause |")[1].split("are compared bitwise")[0],
        re.MULTILINE,
    )
    assert sorted(listed) == sorted(get_args(Cause))
