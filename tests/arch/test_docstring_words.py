"""Docstrings read like PyTorch's: a function's opens with an imperative, a class's with a noun phrase."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
FOLDERS: Final = (ROOT / "src" / "hasten", ROOT / "dropin" / "src")
QUESTIONS: Final = frozenset(
    {
        "What",
        "Whether",
        "Who",
        "Where",
        "How",
        "Which",
        "Why",
        "That",
        "Whoever",
        "Whatever",
    }
)
NOUNS: Final = frozenset(
    {
        "The",
        "A",
        "An",
        "All",
        "Every",
        "This",
        "One",
        "Both",
        "Each",
        "Several",
        "Whole",
    }
)
VERBS: Final = frozenset(
    {
        "Stands",
        "Takes",
        "Leaves",
        "Writes",
        "Counts",
        "Keeps",
        "Reads",
        "Moves",
        "Looks",
        "Shows",
    }
)


def first_word(node: ast.AST) -> str:
    """Return the first word of a docstring; empty where there is none."""
    assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    words = (ast.get_docstring(node) or "").split()
    return words[0].strip(",.:;") if words else ""


def is_value(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Return whether a function is read like an attribute or entered like a block, which a noun describes."""
    names = {
        getattr(decorator, "attr", getattr(decorator, "id", ""))
        for decorator in node.decorator_list
    }
    return bool(names & {"property", "cached_property", "contextmanager", "setter"})


def complaints(text: str, name: str) -> Iterator[str]:
    """Yield a line for each docstring that opens with another kind of word."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ClassDef) and first_word(node) in QUESTIONS | VERBS:
            yield f"{name}:{node.lineno}: class {node.name} opens with {first_word(node)!r}; name what it is"
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            wrong = QUESTIONS if is_value(node) else QUESTIONS | NOUNS
            if first_word(node) in wrong:
                yield f"{name}:{node.lineno}: {node.name}() opens with {first_word(node)!r}; say what it does"


def test_docstrings_open_with_what_a_thing_is_or_does() -> None:
    all_complaints = [
        line
        for folder in FOLDERS
        for file in sorted(folder.rglob("*.py"))
        for line in complaints(file.read_text("utf-8"), file.as_posix())
    ]
    assert not all_complaints, f"{len(all_complaints)} docstrings:\n" + "\n".join(
        all_complaints
    )


def test_a_wrong_opening_is_seen() -> None:
    text = 'class A:\n    """What it is."""\n\ndef f() -> int:\n    """The number."""\n\n@property\ndef g(self) -> int:\n    """The number."""\n'
    assert [
        line.split(": ")[1].split(" opens")[0] for line in complaints(text, "x")
    ] == ["class A", "f()"]
