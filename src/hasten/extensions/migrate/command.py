"""`hasten migrate`: a diff that ports scripts from `accelerate` to `hasten`, with notes on different behaviour."""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Sequence
from pathlib import Path

from hasten.errors import ConfigError
from hasten.extensions.migrate.migrating import migrate


def main(argv: Sequence[str]) -> int:
    """Run `hasten migrate …`; return 0 if nothing is left to do manually, 1 otherwise."""
    given = make_parser().parse_args(argv)
    noted = 0
    sources = {path: _text(path) for path in scripts(given.places)}
    with_accelerate = {
        path: source for path, source in sources.items() if "accelerate" in source
    }
    if not with_accelerate:
        sys.stderr.write(
            "no script here uses accelerate, so there is nothing to migrate\n"
        )
    for path, source in with_accelerate.items():
        try:
            done = migrate(source)
        except SyntaxError as error:
            raise ConfigError(
                f"{path}, line {error.lineno}, is not valid Python ({error.msg}), so it cannot be analysed; nothing was "
                "changed in it. Fix the file, or exclude it."
            ) from error
        before, after = (
            source.splitlines(keepends=True),
            done.text.splitlines(keepends=True),
        )
        sys.stdout.writelines(
            difflib.unified_diff(before, after, fromfile=str(path), tofile=str(path))
        )
        for finding in done.findings:
            sys.stderr.write(f"{path}:{finding.line}: {finding.text}\n")
        noted += len(done.findings)
        if given.write and done.text != source:
            path.write_text(done.text, encoding="utf-8", newline="")
    return 1 if noted else 0


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="hasten migrate",
        description="Print the diff that converts scripts from `accelerate` to `hasten`, and list the lines that behave "
        "differently. Only names are changed. The exit code is 1 if a line needs a review.",
    )
    parser.add_argument(
        "places",
        nargs="+",
        type=Path,
        metavar="SCRIPT_OR_FOLDER",
        help="scripts, or folders of them",
    )
    parser.add_argument("--write", action="store_true", help="change the files")
    return parser


def scripts(places: Sequence[Path]) -> list[Path]:
    """Return the Python files to migrate. Raises: ConfigError for a path that does not exist, or a notebook."""
    found: list[Path] = []
    for place in places:
        if not place.exists():
            raise ConfigError(
                f"{place} does not exist, so there is nothing to migrate; give a script or a folder."
            )
        if place.suffix == ".ipynb":
            raise ConfigError(
                f"{place} is a notebook, whose cells hasten migrate does not rewrite; convert it to a script first (jupyter nbconvert)."
            )
        found += sorted(place.rglob("*.py")) if place.is_dir() else [place]
    return found


def _text(path: Path) -> str:
    try:
        # line endings are preserved
        with path.open(newline="", encoding="utf-8") as file:
            return file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path} cannot be read as UTF-8 text ({error}), so it cannot be analysed; nothing was changed in it. Fix the file, or "
            "exclude it."
        ) from error
