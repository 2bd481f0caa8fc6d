"""Size, names and density of both distributions: bounds that may only fall."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.syntax import lines_of_tokens, nodes, trees

REPOSITORY = Path(__file__).parents[2]
SOURCE = REPOSITORY / "src" / "hasten"
DROPIN = REPOSITORY / "dropin" / "src"
EXTENSIONS = SOURCE / "extensions"

MAX_CORE_TOKENS = 263_700
MAX_TOKENS = 469_250
MAX_FUNCTIONS = 4_872
BOUNDS = {
    SOURCE: {
        "filler_variables": 0.003,
        "short_variables": 0.575,
        "short_functions": 0.202,
        "tokens_a_line": 6.82,
        "long_lines": 0.0175,
        "comprehensions": 0.0187,
        "conditional_expressions": 0.014,
    },
    DROPIN: {
        "filler_variables": 0.0046,
        "short_variables": 0.612,
        "short_functions": 0.174,
        "tokens_a_line": 7.02,
        "long_lines": 0.021,
        "comprehensions": 0.0192,
        "conditional_expressions": 0.0152,
    },
}
"""Shares of variables, of functions and of code lines; a name is short if it is one word."""
LONG_LINE = 20
"""Tokens above which a line is long."""

FILLER = frozenset(
    """found one ones made given known place places whole wholes held kept mine theirs ours rest seen other others own some
    part parts before after at there here both many most more less thing what which who chosen wanted asked told said same
    apart now then again alone near due way how ends begun begins late early about""".split()  # noqa: SIM905 - a list of seventy quoted words is no easier to read
)
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def docstring_lines(tree: ast.Module) -> set[int]:
    """Return the numbers of the lines on which strings stand alone."""
    strings = [
        node.value
        for node in nodes(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    ]
    return {
        line
        for string in strings
        for line in range(string.lineno, (string.end_lineno or string.lineno) + 1)
    }


def code_lines(path: Path, tree: ast.Module) -> Counter[int]:
    """Return the number of tokens of each line of code, without comments and docstrings."""
    left_out = docstring_lines(tree)
    lines = lines_of_tokens(path.read_text(encoding="utf-8"))
    return Counter(line for line in lines if line not in left_out)


def num_tokens(folder: Path, without: Path | None = None) -> int:
    """Return the number of tokens below a folder."""
    total = 0
    for path, tree in trees(folder).items():
        if without is None or not path.is_relative_to(without):
            total += code_lines(path, tree).total()
    return total


def words(name: str) -> list[str]:
    return [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)]


def is_filler(name: str) -> bool:
    """Return whether every word of a name could stand anywhere."""
    return bool(words(name)) and all(word in FILLER for word in words(name))


def variables(tree: ast.Module) -> Iterator[str]:
    """Yield the name of each assigned variable and argument of a file."""
    for node in nodes(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.arg) and node.arg not in ("self", "cls"):
            yield node.arg


def functions(tree: ast.Module) -> Iterator[str]:
    """Yield the name of each function, without properties and methods that Python names."""
    for node in nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            decorators = [ast.unparse(item) for item in node.decorator_list]
            is_property = any(
                "property" in text or "setter" in text for text in decorators
            )
            if not is_property and not node.name.startswith("__"):
                yield node.name


def measure(folder: Path) -> dict[str, float]:
    """Return the shares that `BOUNDS` bounds."""
    variable_names: list[str] = []
    function_names: list[str] = []
    num_comprehensions = num_conditionals = num_long_lines = 0
    num_lines = num_line_tokens = 0
    for path, tree in trees(folder).items():
        variable_names += variables(tree)
        function_names += functions(tree)
        num_comprehensions += sum(
            isinstance(node, COMPREHENSIONS) for node in nodes(tree)
        )
        num_conditionals += sum(isinstance(node, ast.IfExp) for node in nodes(tree))
        tokens_of_line = code_lines(path, tree)
        num_lines += len(tokens_of_line)
        num_line_tokens += tokens_of_line.total()
        num_long_lines += sum(count > LONG_LINE for count in tokens_of_line.values())
    num_short_variables = sum(len(words(name)) < 2 for name in variable_names)
    num_short_functions = sum(len(words(name)) < 2 for name in function_names)
    return {
        "filler_variables": sum(map(is_filler, variable_names)) / len(variable_names),
        "short_variables": num_short_variables / len(variable_names),
        "short_functions": num_short_functions / len(function_names),
        "tokens_a_line": num_line_tokens / num_lines,
        "long_lines": num_long_lines / num_lines,
        "comprehensions": num_comprehensions / num_lines,
        "conditional_expressions": num_conditionals / num_lines,
    }


def test_the_core_only_shrinks() -> None:
    assert num_tokens(SOURCE, without=EXTENSIONS) <= MAX_CORE_TOKENS


def test_the_library_only_shrinks() -> None:
    assert num_tokens(SOURCE) <= MAX_TOKENS
    defined = [
        node
        for tree in trees(SOURCE).values()
        for node in nodes(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    assert len(defined) <= MAX_FUNCTIONS


@pytest.mark.parametrize("folder", BOUNDS, ids=lambda folder: folder.name)
def test_names_and_lines_only_get_better(folder: Path) -> None:
    measured = measure(folder)
    above = {
        name: round(measured[name], 4)
        for name, bound in BOUNDS[folder].items()
        if measured[name] > bound
    }
    assert not above
