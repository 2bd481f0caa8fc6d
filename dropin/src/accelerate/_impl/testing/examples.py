"""Comparison of example scripts: which lines of a feature's example are missing in the complete one."""

from __future__ import annotations

from pathlib import Path


def get_function_contents_by_name(lines: list[str], name: str) -> list[str] | None:
    """Return the lines of the function `training_function` or `main`; `main` ends where the script is started."""
    if name not in ("training_function", "main"):
        raise ValueError(f"Incorrect function name passed: {name}, choose either 'main' or 'training_function'")
    found: list[str] = []
    inside = False
    for line in lines:
        starts = f"def {name}" in line
        if not inside and starts:
            inside = True
            found.append(line)
        elif inside and (
            (name == "training_function" and "def main" in line) or (name == "main" and "if __name__" in line)
        ):
            return found
        elif inside:
            found.append(line)
    return None


def clean_lines(lines: list[str]) -> list[str]:
    """Return the lines without comments and without a line break alone."""
    return [line for line in lines if not line.lstrip().startswith("#") and line != "\n"]


def compare_against_test(
    base_filename: str, feature_filename: str, parser_only: bool, secondary_filename: str | None = None
) -> list[str]:
    """Return the lines that the feature's example adds to the base and the complete example lacks."""
    name = "main" if parser_only else "training_function"
    base, feature = (
        clean_lines(get_function_contents_by_name(Path(one).read_text().splitlines(keepends=True), name) or [])
        for one in (base_filename, feature_filename)
    )
    added = [line for line in feature if line not in base]
    missing = [line for line in base if line not in feature]
    if secondary_filename is None:
        return sorted([*added, *missing])
    second = Path(secondary_filename).read_text().splitlines(keepends=True)
    other = clean_lines(get_function_contents_by_name(second, name) or [])
    return [line for line in [*added, *missing] if line not in other]
