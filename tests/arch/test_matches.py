"""A `match` over our own literals is exhaustive: a new value cannot fall through it in silence."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

SOURCES = Path(__file__).parents[2] / "src" / "hasten"


def falls_through(tree: ast.AST) -> Iterator[int]:
    """Yield the lines of matches over strings that end their function, some of whose cases return, and no case takes the rest."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef) or not isinstance(last := node.body[-1], ast.Match):
            continue
        returns = any(isinstance(case.body[-1], ast.Return) for case in last.cases)
        takes_the_rest = isinstance(pattern := last.cases[-1].pattern, ast.MatchAs) and pattern.pattern is None
        if returns and not takes_the_rest:
            yield last.lineno


def test_no_match_falls_through() -> None:
    found = []
    for path in sorted(SOURCES.rglob("*.py")):
        found += [f"{path.relative_to(SOURCES)}:{line}" for line in falls_through(ast.parse(path.read_text()))]
    assert not found, f"end each with `case other: assert_never(other)`, or return after it: {found}"


def test_the_rule_finds_a_fall_through() -> None:
    source = "def f(x):\n    match x:\n        case 'a':\n            return 1\n        case 'b':\n            return 2\n"
    assert list(falls_through(ast.parse(source))) == [2]
    assert list(falls_through(ast.parse(source + "        case other:\n            assert_never(other)\n"))) == []
    assert list(falls_through(ast.parse(source + "    return 0\n"))) == []
