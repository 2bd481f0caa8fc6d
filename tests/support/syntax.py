"""Syntax trees of the repository's Python files, parsed and walked once in a process."""

from __future__ import annotations

import ast
import gc
import io
import tokenize
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType


@cache  # the files do not change while they are tested
def trees(folder: Path) -> Mapping[Path, ast.Module]:
    """Return the Python files below a folder, in order, each with its syntax tree.

    The garbage collector is off meanwhile and never looks at the trees: millions of objects that stay would make each of
    its passes slow, and take three times as long as the parsing.
    """
    gc.collect()
    gc.disable()
    try:
        parsed = {
            path: ast.parse(path.read_text("utf-8"), str(path))
            for path in sorted(folder.rglob("*.py"))
        }
        gc.freeze()
    finally:
        gc.enable()
    return MappingProxyType(parsed)


@cache  # several rules look at each tree
def nodes(tree: ast.Module) -> tuple[ast.AST, ...]:
    """Return all nodes of a tree, in the order of `ast.walk`, which takes longer than most of what is done with them."""
    return tuple(ast.walk(tree))


LAYOUT = frozenset(
    {
        tokenize.COMMENT,
        tokenize.NL,
        tokenize.NEWLINE,
        tokenize.INDENT,
        tokenize.DEDENT,
        tokenize.ENCODING,
        tokenize.ENDMARKER,
    }
)
"""Tokens that a reader does not read: comments, line ends and indentation."""


@cache  # several rules count the same files
def lines_of_tokens(text: str) -> tuple[int, ...]:
    """Return for each token of a file, layout left out, the line that it starts on."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return tuple(token.start[0] for token in tokens if token.type not in LAYOUT)
