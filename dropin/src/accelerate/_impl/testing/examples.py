"""Comparison of example scripts: which lines of a feature's example are missing in the complete one."""

from __future__ import annotations

from itertools import dropwhile, islice, takewhile
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
    """Return the lines that a feature's example adds to `examples/nlp_example.py` and the complete example lacks."""
    name = "main" if parser_only else "training_function"
    known = {line for one in ("examples/nlp_example.py", base_filename) for line in _cleaned(one, name)}
    lines, added = _cleaned(feature_filename, name), []
    following = iter(lines)
    for line in islice(following, max(len(lines) - 1, 0)):  # the last line is no feature's
        if "TESTING_MOCKED_DATALOADERS" in line:
            next(following)  # what it stands over
        elif line not in known:
            added.append(line)
    return added


def _cleaned(file: str, name: str) -> list[str]:
    lines = Path(file).absolute().read_text().splitlines(keepends=True)
    return clean_lines(get_function_contents_by_name(lines, name) or [])
