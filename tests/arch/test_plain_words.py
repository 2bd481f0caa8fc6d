"""Messages and documentation pages use plain words: phrases that a reader must decode are listed here and forbidden."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

REPOSITORY: Final = Path(__file__).parents[2]
SOURCE: Final = REPOSITORY / "src" / "hasten"
FOLDERS: Final = (
    "bigmodel",
    "cli",
    "data",
    "extensions",
    "launch",
    "modules",
    "progress",
    "strategies",
    "tracking",
    "trainer",
    "trust",
)
"""Folders whose messages are checked; each folder is added when its messages have been reworded."""
PAGES: Final = (
    *sorted((REPOSITORY / "docs").rglob("*.md")),
    REPOSITORY / "CONTRIBUTING.md",
    REPOSITORY / "examples" / "README.md",
)
INSTEAD: Final = {
    r"goes? on|went on|going on": "continue",
    r"of (?:its|their|your|one's) own": "separate, custom",
    r"nobody|whoever|everybody|somebody|anybody": "the rank, process or user",
    r"drifts? apart(?!\]?\(#)": "diverge",
    r"(?:cannot|can not) be honoured": "is not supported",
    r"(?:was|were) asked for": "was requested, is not supported",
    r"(?:does|did) not answer": "does not respond",
    r"without a word|in silence": "silently, without a message",
    r"was told|were told|is told": "received a signal, was configured",
    r"is gone|are gone": "has exited, is missing",
    r"hands? (?:out|over)": "return, pass, distribute",
    r"(?:its|their) kin": "and similar",
    r"holds? up": "delay",
    r"takes? (?:its|their) place": "replace",
    r"come(?:s)? out again": "are exported, are returned",
    r"the house|rooms of|the room\b": "folder",
    r"seams?": "interface",
}
"""Forbidden phrase, as a regular expression, and the words to use instead."""


def strings(text: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of each string that is no docstring; values in f-strings are replaced by {}."""
    tree = ast.parse(text)
    skipped = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            skipped.update(id(segment) for segment in node.values)
            if id(node) not in skipped:
                segments = [
                    str(segment.value) if isinstance(segment, ast.Constant) else "{}"
                    for segment in node.values
                ]
                yield node.lineno, "".join(segments)
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and id(node) not in skipped
        ):
            yield node.lineno, node.value


def prose(page: str) -> str:
    """Return a page without its code blocks and inline code, with the lines in place."""
    blanked = re.sub(
        r"^```.*?^```",
        lambda block: "\n" * block[0].count("\n"),
        page,
        flags=re.MULTILINE | re.DOTALL,
    )
    blanked = re.sub(
        r"<!-- .*?-->",
        lambda block: "\n" * block[0].count("\n"),
        blanked,
        flags=re.DOTALL,
    )
    return re.sub(r"`[^`\n]*`", "``", blanked)


def complaints(text: str, where: str, line: int = 1) -> Iterator[str]:
    """Yield a line for each forbidden phrase in a text."""
    for phrase, instead in INSTEAD.items():
        for occurrence in re.finditer(rf"\b(?:{phrase})\b", text, re.IGNORECASE):
            yield f"{where}:{line + text[: occurrence.start()].count(chr(10))}: {occurrence[0]!r}; write: {instead}"


def test_messages_use_plain_words() -> None:
    all_complaints = [
        complaint
        for folder in FOLDERS
        for file in sorted((SOURCE / folder).rglob("*.py"))
        for line, text in strings(file.read_text("utf-8"))
        for complaint in complaints(text, file.relative_to(REPOSITORY).as_posix(), line)
    ]
    assert not all_complaints, f"{len(all_complaints)} phrases:\n" + "\n".join(
        all_complaints
    )


def test_pages_use_plain_words() -> None:
    all_complaints = [
        complaint
        for page in PAGES
        for complaint in complaints(
            prose(page.read_text("utf-8")), page.relative_to(REPOSITORY).as_posix()
        )
    ]
    assert not all_complaints, f"{len(all_complaints)} phrases:\n" + "\n".join(
        all_complaints
    )


def test_a_forbidden_phrase_is_seen() -> None:
    code = '"""Nobody reads this."""\nraise ValueError(f"rank {rank} does not answer; "\n    "training goes on")\n'
    assert [
        complaint.split(";")[0]
        for line, text in strings(code)
        for complaint in complaints(text, "x", line)
    ] == [
        "x:2: 'goes on'",
        "x:2: 'does not answer'",
    ]
    page = "One line.\n\n```python\nwhoever = 1\n```\n\nA file of `its own` for whoever\nreads.\n"
    assert list(complaints(prose(page), "p")) == [
        "p:7: 'whoever'; write: the rank, process or user"
    ]
