"""The mutants of `make mutants`: one change each, in code that acts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mutants.mutate import Mutant, mutants_of

SOURCE = '''
"""A docstring with 3."""
LIMIT = 4
def clamp(value: int = 2, *, is_open: bool = True) -> int:
    if value < 10 and is_open:
        raise ValueError(f"{value + 1} of 10")
    while not is_open:
        value = -value
    return value - 1
def evens(values: list[int], exact) -> list[int]:
    assert 5 not in values
    return [
        value
        for value in values
        if exact(value)
    ]
'''


@pytest.fixture
def mutants(tmp_path: Path) -> list[Mutant]:
    """Return the mutants of SOURCE."""
    path = tmp_path / "clamp.py"
    path.write_text(SOURCE)
    return mutants_of(path)


def test_each_mutant_changes_one_token_outside_of_messages(
    mutants: list[Mutant],
) -> None:
    assert [(mutant.function, mutant.line, mutant.change) for mutant in mutants] == [
        ("", 3, "LIMIT = 4 -> LIMIT = 5"),
        ("clamp", 4, "2 -> 3"),
        ("clamp", 4, "True -> False"),
        (
            "clamp",
            5,
            "if value < 10 and is_open -> if not (value < 10 and is_open)",
        ),
        ("clamp", 5, "value < 10 and is_open -> value < 10 or is_open"),
        ("clamp", 5, "value < 10 and is_open -> value <= 10 and is_open"),
        ("clamp", 5, "value < 10 and is_open -> value < 11 and is_open"),
        ("clamp", 7, "while not is_open -> while not not is_open"),
        ("clamp", 8, "value = -value -> value = +value"),
        ("clamp", 9, "return value - 1 -> return None"),
        ("clamp", 9, "return value - 1 -> return value + 1"),
        ("clamp", 9, "return value - 1 -> return value - 2"),
        (
            "evens",
            12,
            "return [value for value in values if exact(value)] -> return None",
        ),
        (
            "evens",
            15,
            "return [value for value in values if exact(value)]"
            " -> return [value for value in values if not exact(value)]",
        ),
    ]


def test_a_mutant_knows_the_lines_that_run_with_its_change(
    mutants: list[Mutant],
) -> None:
    lines = {mutant.change.partition(" -> ")[0]: mutant.lines for mutant in mutants}
    assert lines["LIMIT = 4"] == set()
    assert lines["2"] == {5, 6, 7, 8, 9}
    assert lines["while not is_open"] == {7}
    assert lines["return [value for value in values if exact(value)]"] == set(
        range(12, 17)
    )


def test_every_mutant_is_another_program(mutants: list[Mutant]) -> None:
    codes = [mutant.code() for mutant in mutants]
    original = compile(SOURCE, codes[0].co_filename, "exec")
    assert len({original, *codes}) == len(codes) + 1
