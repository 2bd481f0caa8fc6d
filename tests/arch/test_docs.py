"""Documentation that cannot lie about names: Python snippets parse, what they import exists, links lead somewhere."""

from __future__ import annotations

import ast
import importlib
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

REPOSITORY: Final = Path(__file__).parents[2]
PUBLIC: Final = tuple(
    f"hasten{name}"
    for name in (
        "",
        ".bigmodel",
        ".data",
        ".errors",
        ".extending",
        ".modules",
        ".testing",
        ".trainer",
    )
)
"""The modules that documentation imports from; all others may change."""
PAGES: Final = (
    *sorted(REPOSITORY.glob("*.md")),
    *sorted((REPOSITORY / "docs").rglob("*.md")),
)


def snippets(text: str) -> Iterator[tuple[int, str]]:
    """Yield line number and text of every Python block."""
    for block in re.finditer(
        r"^[ ]*```(?:python|py)\b[^\n]*\n(.*?)^[ ]*```", text, re.MULTILINE | re.DOTALL
    ):
        yield text[: block.start(1)].count("\n") + 1, textwrap.dedent(block.group(1))


def missing_names(tree: ast.Module) -> Iterator[str]:
    """Yield what a snippet imports from hasten and would not find."""
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.ImportFrom)
            and (node.module or "").split(".")[0] == "hasten"
        ):
            module = importlib.import_module(node.module or "")
            for alias in node.names:
                if not hasattr(module, alias.name) and not exists(
                    f"{node.module}.{alias.name}"
                ):
                    yield f"{node.module}.{alias.name}"
        elif isinstance(node, ast.Import):
            yield from (
                a.name
                for a in node.names
                if a.name.split(".")[0] == "hasten" and not exists(a.name)
            )


def private_modules(tree: ast.Module) -> Iterator[str]:
    """Yield the modules of hasten that a snippet imports from although they are not public."""
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.ImportFrom)
            and (node.module or "").split(".")[0] == "hasten"
        ):
            yield from [node.module or ""] if node.module not in PUBLIC else []


def exists(module: str) -> bool:
    """Say whether a module can be imported."""
    try:
        importlib.import_module(module)
    except ModuleNotFoundError:
        return False
    return True


@pytest.mark.parametrize(
    "page", PAGES, ids=lambda page: page.relative_to(REPOSITORY).as_posix()
)
def test_snippets_parse_and_import_what_exists(page: Path) -> None:
    complaints = []
    for line, snippet in snippets(page.read_text("utf-8")):
        try:
            tree = ast.parse(snippet)
        except SyntaxError as error:
            complaints.append(
                f"{page.name}:{line + (error.lineno or 1) - 1}: {error.msg}"
            )
        else:
            complaints += [
                f"{page.name}:{line}: {name} does not exist"
                for name in missing_names(tree)
            ]
            complaints += [
                f"{page.name}:{line}: {name} is not public"
                for name in private_modules(tree)
            ]
    assert not complaints, "\n".join(complaints)


@pytest.mark.parametrize(
    "page", PAGES, ids=lambda page: page.relative_to(REPOSITORY).as_posix()
)
def test_relative_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(
        r"\]\((?!https?:|mailto:|#)([^)#\s]+)", page.read_text("utf-8")
    )
    broken = [target for target in targets if not (page.parent / target).exists()]
    assert not broken, f"{page.name} links to {broken}"


def test_a_wrong_name_is_seen() -> None:
    tree = ast.parse(
        "from hasten import Acelerator\nimport hasten.nowhere\nfrom hasten import __version__"
    )
    assert list(missing_names(tree)) == ["hasten.Acelerator", "hasten.nowhere"]


def test_a_private_module_is_seen() -> None:
    tree = ast.parse(
        "from hasten.testing.pool import ranks\nfrom hasten.errors import ConfigError\nfrom os import path"
    )
    assert list(private_modules(tree)) == ["hasten.testing.pool"]
