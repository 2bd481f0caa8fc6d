"""The proof of renames sees every other change."""

from __future__ import annotations

import re

import pytest

from tests.arch.renames import differences_of

OLD_SOURCE = """
from torch import nn

def cut(model: nn.Module, own=None):
    \"\"\"Cut a model.\"\"\"
    found = [one for one in model.modules() if one is not own]
    return sorted(found, key=len), "cut"
"""


def differences(*changes: tuple[str, str]) -> list[str]:
    new_source = OLD_SOURCE
    for old, new in changes:
        assert old in new_source
        new_source = re.sub(rf"(?<!\w){re.escape(old)}(?!\w)", new, new_source)
    return differences_of({"units.py": OLD_SOURCE}, {"units.py": new_source})


def test_renames_are_accepted() -> None:
    assert not differences(
        ("found", "units"),
        ("one", "unit"),
        ("cut", "split"),
        ("own", "skipped_unit"),
        ("Cut a model", "Split a model"),
    )


@pytest.mark.parametrize(
    "change",
    [
        ("is not own", "is own"),
        ("key=len", "key=abs"),
        ("found = ", "found: list = "),
        ("sorted(found", "sorted(own"),
        ("if one is not own", ""),
        ('"cut"', '"paste"'),
        ("own=None", "own=1"),
    ],
)
def test_other_changes_are_named(change: tuple[str, str]) -> None:
    assert differences(change)


def test_two_names_may_not_become_one() -> None:
    assert differences(("found", "own"))
