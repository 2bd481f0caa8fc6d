"""What scripts and libraries compute on the drop-in equals what they computed on the original package.

The numbers of the original lie in golden/, recorded by `make parity` (record.py), which runs all of it under both packages.
"""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

TESTS_FOLDER = Path(__file__).parent
GOLDEN = TESTS_FOLDER / "golden"
NEEDED = {
    "trainer": "transformers",
    "lora": "peft",
    "sft": "trl",
    "sentences": "sentence_transformers",
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("processes", [1, 2])
def test_small_scripts_equal_the_original(
    tmp_path: Path, warm: Any, parity: ModuleType, processes: int
) -> None:
    out = tmp_path / "out.json"
    done = warm.run(
        tmp_path, [str(TESTS_FOLDER / "run_parity.py"), "run", str(out)], processes
    )
    assert not done.failed, done.err
    recorded = json.loads((GOLDEN / f"parity_{processes}.json").read_text())
    assert (
        parity.unexplained(f"parity_{processes}", recorded, json.loads(out.read_text()))
        == []
    )
    assert len(recorded) >= (180 if processes == 1 else 100)


def test_every_page_of_the_documentation_has_scripts(parity: ModuleType) -> None:
    rows = (TESTS_FOLDER / "parity" / "PAGES.md").read_text().splitlines()[4:]
    covering = {row.split("|")[1].strip(): re.findall(r"`(\w+)`", row) for row in rows}
    assert len(covering) > 40 and all(covering.values())
    assert {name for names in covering.values() for name in names} <= set(
        parity.names()
    )
    assert len(parity.names()) >= 120


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "processes", [pytest.param(1, marks=pytest.mark.exhaustive), 2]
)
@pytest.mark.parametrize("client", sorted(NEEDED))
def test_libraries_equal_the_original(
    tmp_path: Path, warm: Any, parity: ModuleType, client: str, processes: int
) -> None:
    if importlib.util.find_spec(NEEDED[client]) is None:
        pytest.skip(
            f"{NEEDED[client]} is not installed (pip install 'hasten[clients]')"
        )
    out = tmp_path / "out.json"
    done = warm.run(
        tmp_path,
        [
            str(TESTS_FOLDER / "clients" / f"{client}.py"),
            str(tmp_path / "run"),
            str(out),
        ],
        processes,
    )
    assert not done.failed, done.err
    recorded = json.loads((GOLDEN / f"{client}_{processes}.json").read_text())
    assert parity.differences(recorded, json.loads(out.read_text())) == []
