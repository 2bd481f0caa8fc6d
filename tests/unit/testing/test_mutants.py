"""The mutants of `make mutants`: one change each, in code that acts."""

from __future__ import annotations

import ast

from tests.mutants.mutate import mutants_of

SOURCE = '''
"""A docstring with 3."""
def clamp(value: int = 2, *, is_open: bool = True) -> int:
    if value < 10 and is_open:
        raise ValueError(f"{value + 1} of 10")
    return value - 1
'''


def test_each_mutant_changes_one_token_outside_of_messages() -> None:
    changes = [mutant.change for mutant in mutants_of("clamp.py", SOURCE)]
    assert changes == [
        "2 -> 3",
        "True -> False",
        "if value < 10 and is_open -> if not (value < 10 and is_open)",
        "value < 10 and is_open -> value < 10 or is_open",
        "value < 10 -> value <= 10",
        "10 -> 11",
        "return value - 1 -> return None",
        "value - 1 -> value + 1",
        "1 -> 2",
    ]


def test_every_mutant_is_another_program() -> None:
    original = ast.unparse(ast.parse(SOURCE))
    sources = [mutant.source for mutant in mutants_of("clamp.py", SOURCE)]
    assert len({original, *sources}) == len(sources) + 1
