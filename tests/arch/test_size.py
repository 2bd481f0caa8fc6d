"""The size of the library, and the share of names that say nothing: bounds that may only fall."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.syntax import lines_of_tokens

SOURCE = Path(__file__).parents[2] / "src" / "hasten"
EXTENSIONS = SOURCE / "extensions"

MAX_CORE_TOKENS = 291_900
MAX_TOKENS = 529_400
MAX_FILLER_SHARE = 0.048
"""Share of variables named by words that could stand anywhere."""

FILLER = frozenset(
    [
        "found",
        "one",
        "ones",
        "made",
        "given",
        "known",
        "place",
        "places",
        "whole",
        "wholes",
        "held",
        "kept",
        "mine",
        "theirs",
        "ours",
        "rest",
        "seen",
        "other",
        "others",
        "own",
        "some",
        "part",
        "parts",
        "before",
        "after",
        "at",
        "there",
        "here",
        "both",
        "many",
        "most",
        "more",
        "less",
        "thing",
        "what",
        "which",
        "who",
        "chosen",
        "wanted",
        "asked",
        "told",
        "said",
        "same",
        "apart",
        "now",
        "then",
        "again",
        "alone",
        "near",
        "due",
        "way",
        "how",
        "ends",
        "begun",
        "begins",
        "late",
        "early",
        "about",
    ]
)


def num_tokens(paths: list[Path]) -> int:
    """Return the number of tokens of source files, without comments and docstrings."""
    total = 0
    for path in paths:
        source = path.read_text(encoding="utf-8")
        lines = docstring_lines(ast.parse(source))
        total += sum(line not in lines for line in lines_of_tokens(source))
    return total


def docstring_lines(tree: ast.Module) -> set[int]:
    """Return the numbers of the lines on which strings stand alone."""
    strings = [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    ]
    return {
        line
        for string in strings
        for line in range(string.lineno, (string.end_lineno or string.lineno) + 1)
    }


def variables(path: Path) -> Iterator[str]:
    """Yield the name of each assigned variable and argument of a file."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.arg):
            yield node.arg


def is_filler(name: str) -> bool:
    """Return whether every word of a name could stand anywhere."""
    words = [word.lower() for word in re.findall(r"[A-Z]?[a-z]+", name)]
    return bool(words) and all(word in FILLER for word in words)


@pytest.fixture(scope="module")
def files() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"))


def test_the_core_only_shrinks(files: list[Path]) -> None:
    core = [path for path in files if not path.is_relative_to(EXTENSIONS)]
    assert num_tokens(core) <= MAX_CORE_TOKENS


def test_the_library_only_shrinks(files: list[Path]) -> None:
    assert num_tokens(files) <= MAX_TOKENS


def test_names_only_get_better(files: list[Path]) -> None:
    names = [name for path in files for name in variables(path)]
    assert sum(map(is_filler, names)) <= MAX_FILLER_SHARE * len(names)
