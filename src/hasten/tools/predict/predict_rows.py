"""The rows that `hasten predict` reads: a JSON-lines, CSV, TSV or text file, each row a dict."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from hasten.errors import ConfigError, DataError

KINDS: Final = (".jsonl", ".csv", ".tsv", ".txt")

# Any in this file: the values of a row are the user's own.


def read_rows(path: Path) -> Sequence[dict[str, Any]]:
    """All rows of a file; a line of a text file is the column `text`.

    Raises: ConfigError for a file of another kind, DataError for a line that is no row.
    """
    match path.suffix:
        case ".jsonl":
            return [_decoded(path, number, line) for number, line in _lines(path)]
        case ".csv" | ".tsv":
            return list(_cells(path, "," if path.suffix == ".csv" else "\t"))
        case ".txt":
            return [{"text": line} for line in _text(path).splitlines()]
        case _:
            raise ConfigError(
                f"{path} ends neither in {' nor in '.join(KINDS)}, so its rows cannot be told apart; convert it to JSON lines, "
                "one object per row."
            )


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path} is not UTF-8 text (byte {error.object[error.start]:#04x} at {error.start}), so its rows cannot be read; save it as UTF-8."
        ) from error


def _cells(path: Path, delimiter: str) -> Iterator[dict[str, Any]]:
    reader = csv.DictReader(io.StringIO(_text(path), newline=""), delimiter=delimiter)
    try:
        for row in reader:
            if None in row:
                raise DataError(
                    f"{path}, line {reader.line_num} has more cells than the {len(reader.fieldnames or ())} columns of the first line, so it is "
                    "unclear which belong to which; repair or remove the line."
                )
            yield row
    except csv.Error as error:
        raise DataError(
            f"{path}, line {reader.line_num + 1} cannot be read ({error}), so it is no row; repair or remove the line."
        ) from error


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    for number, line in enumerate(path.read_bytes().split(b"\n"), start=1):
        if line.strip():
            yield number, line


def _decoded(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        return msgspec.json.decode(line, type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise DataError(
            f"{path}, line {number} is no JSON object ({error}), so it is no row; repair or remove the line."
        ) from error
