"""Comparison of example scripts: which lines of a feature's example are missing in the complete one."""

from __future__ import annotations

from itertools import dropwhile, takewhile
from pathlib import Path


def get_function_contents_by_name(lines: list[str], name: str) -> list[str] | None:
    """Return the lines of the function `training_function` or `main`; `main` ends where the script is started."""
    if name not in ("training_function", "main"):
        raise ValueError(f"Incorrect function name passed: {name}, choose either 'main' or 'training_function'")
    ends = "def main" if name == "training_function" else "if __name__"
    inside = list(dropwhile(lambda line: f"def {name}" not in line, lines))
    return list(takewhile(lambda line: ends not in line, inside)) if any(ends in line for line in inside) else None


def clean_lines(lines: list[str]) -> list[str]:
    """Return the lines without comments and without a line break alone."""
    return [line for line in lines if not line.lstrip().startswith("#") and line != "\n"]


def compare_against_test(
    base_filename: str, feature_filename: str, parser_only: bool, secondary_filename: str | None = None
) -> list[str]:
    """Return the lines that the feature's example adds to the base and the complete example lacks."""
    name = "main" if parser_only else "training_function"
    base, feature = (_cleaned(one, name) for one in (base_filename, feature_filename))
    changed = [line for line in feature if line not in base] + [line for line in base if line not in feature]
    if secondary_filename is None:
        return changed
    other = _cleaned(secondary_filename, name)
    return [line for line in changed if line not in other]


def _cleaned(file: str, name: str) -> list[str]:
    lines = Path(file).read_text().splitlines(keepends=True)
    return clean_lines(get_function_contents_by_name(lines, name) or [])
