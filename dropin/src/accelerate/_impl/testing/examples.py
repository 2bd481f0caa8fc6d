"""Comparison of example scripts: which lines of a feature's example are missing in the complete one."""

from __future__ import annotations

from itertools import dropwhile, islice, takewhile
from pathlib import Path

_PLAIN = "examples/nlp_example.py"


def get_function_contents_by_name(lines: list[str], name: str) -> list[str] | None:
    """Return the lines of the function `training_function` or `main`; `main` ends where the script is started."""
    if name not in ("training_function", "main"):
        raise ValueError(
            f"Incorrect function name passed: {name}, choose either 'main' or 'training_function'"
        )
    if name == "training_function":
        end_marker = "def main"
    else:
        end_marker = "if __name__"
    inside = list(dropwhile(lambda line: f"def {name}" not in line, lines))
    if any(end_marker in line for line in inside):
        return list(takewhile(lambda line: end_marker not in line, inside))
    return None


def clean_lines(lines: list[str]) -> list[str]:
    code_lines = []
    for line in lines:
        if not line.lstrip().startswith("#") and line != "\n":
            code_lines.append(line)
    return code_lines


def compare_against_test(
    base_filename: str,
    feature_filename: str,
    parser_only: bool,
    secondary_filename: str | None = None,
) -> list[str]:
    """Return what a feature's example adds to `nlp_example.py` and the complete example, or the second file's function, lacks."""
    function_name = "main" if parser_only else "training_function"
    plain = _cleaned_lines(_PLAIN, function_name)
    known_lines = {*_cleaned_lines(base_filename, function_name)}
    if secondary_filename is not None:
        known_lines |= {*Path(_PLAIN).read_text().splitlines(keepends=True)}.difference(
            _cleaned_lines(secondary_filename, function_name)
        )
    new_lines = []
    for line in _added_lines(_cleaned_lines(feature_filename, function_name), plain):
        if line not in known_lines:
            new_lines.append(line)
    return new_lines


def _added_lines(lines: list[str], plain: list[str]) -> list[str]:
    """Return the lines that are not plain: neither the last one nor what stands below a test for mocked loaders."""
    added_lines = []
    following = iter(lines)
    for line in islice(following, max(len(lines) - 1, 0)):
        if line not in plain and "TESTING_MOCKED_DATALOADERS" in line:
            next(following)
        elif line not in plain:
            added_lines.append(line)
    return added_lines


def _cleaned_lines(file: str, name: str) -> list[str]:
    lines = Path(file).read_text().splitlines(keepends=True)
    return clean_lines(get_function_contents_by_name(lines, name) or [])
