"""A corpus of wrong files, variables and command lines: each must end in exactly the message written beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from hasten import errors
from hasten.cli import flags
from hasten.config import files, handoff
from hasten.config.resolve import Resolved, resolve

CORPUS: Final = Path(__file__).with_name("corpus")
CASES: Final = {
    f"{file.stem}-{name}": case
    for file in sorted(CORPUS.glob("*.yaml"))
    for name, case in yaml.safe_load(file.read_text("utf-8")).items()
}


def settings_of(case: dict[str, Any]) -> Resolved:
    """Resolve a case as the command line does."""
    parser = flags.SettingsParser(prog="hasten")
    parser.add_settings()
    env = case.get("env", {})
    flag_settings = parser.parse_args(case.get("argv", [])).settings
    file = files.read_text(case.get("file", ""), Path("c.yaml"))
    handed = (
        handoff.unpack_settings(env[handoff.VARIABLE])
        if handoff.VARIABLE in env
        else ()
    )
    return resolve(
        flags=flag_settings, env=env, file=file.entries, notes=file.notes, handed=handed
    )


def test_corpus_is_large_enough() -> None:
    assert len(CASES) >= 100


@pytest.mark.parametrize("name", CASES)
def test_bad_settings_end_in_their_message(name: str) -> None:
    case = CASES[name]
    with pytest.raises(errors.ConfigError) as caught:
        settings_of(case)
    assert str(caught.value) == case["says"].rstrip("\n")
    assert type(caught.value).__name__ == case["error"]
    for problem in caught.value.problems or (caught.value,):
        if "file" in case and not isinstance(problem, errors.ContradictionError):
            assert str(problem).startswith("c.yaml:"), (
                "a problem of a file begins with file and line"
            )
