"""Rows of an input file, and an output file written in parts by all processes."""

from __future__ import annotations

import csv
import io
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from hasten.errors import ConfigError, DataError

_MOST_PARTS: Final = 512
_JOB: Final = "job.json"

# Any in this file: the facts of a job and the results are JSON values.


@dataclass(frozen=True, slots=True)
class RowParts:
    """The parts of an output: whole batches each, divided identically for any number of processes."""

    output: Path
    num_rows: int
    batch_size: int

    @property
    def folder(self) -> Path:
        """The folder of finished parts."""
        return self.output.with_name(f"{self.output.name}.parts")

    @property
    def rows_per_part(self) -> int:
        """Rows of every part but the last: one batch, or more if that would make too many files."""
        num_batches = -(-self.num_rows // self.batch_size)
        return self.batch_size * max(-(-num_batches // _MOST_PARTS), 1)

    @property
    def count(self) -> int:
        """The number of parts."""
        return -(-self.num_rows // self.rows_per_part)

    def batches(self, part: int) -> list[range]:
        """Return the row ranges of the batches of a part."""
        first, last = (
            part * self.rows_per_part,
            min((part + 1) * self.rows_per_part, self.num_rows),
        )
        return [
            range(begin, min(begin + self.batch_size, last))
            for begin in range(first, last, self.batch_size)
        ]

    def missing(self) -> list[int]:
        """Return the parts that are not finished."""
        return [part for part in range(self.count) if not self._path(part).exists()]

    def begin(self, job: Mapping[str, Any]) -> str:
        """Reuse the parts of the same job, remove those of another; return the facts that differ. Ranks: main only."""
        text = json.dumps(dict(job), sort_keys=True)
        record = self.folder / _JOB
        differing = ""
        if self.folder.exists():
            known = _facts(record)
            differing = ", ".join(
                sorted(
                    name for name in {*known, *job} if known.get(name) != job.get(name)
                )
            )
            if differing:
                shutil.rmtree(self.folder)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_whole(record, text + "\n")
        except OSError as error:
            raise ConfigError(
                f"--output={self.output} cannot be written ({error.strerror}), so the results cannot be saved; give a file in a folder "
                "that "
                "you may write to."
            ) from error
        return differing

    def finish(self, part: int, results: Sequence[Any]) -> None:
        """Write the results of a part, one per line."""
        write_whole(
            self._path(part), "".join(f"{to_json(result)}\n" for result in results)
        )

    def publish(self) -> None:
        """Join all parts in order into the output, and remove them. Ranks: main only, when none is missing."""
        draft = self.folder / "output"
        with draft.open("wb") as file:
            for part in range(self.count):
                file.write(self._path(part).read_bytes())
            file.flush()
            os.fsync(file.fileno())
        draft.replace(self.output)
        shutil.rmtree(self.folder)

    def _path(self, part: int) -> Path:
        return self.folder / f"{part:06d}.jsonl"


def _facts(record: Path) -> dict[str, Any]:
    """Return the facts of an earlier job; empty if it was interrupted while writing them."""
    try:
        known = json.loads(record.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}


def write_whole(path: Path, text: str) -> None:
    """Write a file atomically, even if the machine stops."""
    draft = path.with_name(f".{path.name}.draft")
    with draft.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)


def to_json(result: Any) -> str:
    """Return a result as one line of JSON; a value that is not a dict becomes the value of `prediction`."""
    return json.dumps(
        result if isinstance(result, dict) else {"prediction": result},
        default=_plain,
        ensure_ascii=False,
    )


def _plain(value: Any) -> Any:
    """Convert arrays and tensors to lists."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise DataError(
        f"a result holds a {type(value).__name__}, which cannot be written as JSON; return numbers, text, lists, dicts or tensors."
    )


KINDS: Final = (".jsonl", ".csv", ".tsv", ".txt")

# Any in this file: the values of a row.


def read_rows(path: Path) -> Sequence[dict[str, Any]]:
    """Return all rows of a file; each line of a text file has the column `text`.

    Raises: ConfigError for an unsupported kind of file, DataError for a line that is not a row.
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
                f"{path} ends neither in {' nor in '.join(KINDS)}, so its format is unknown; convert it to JSON lines, "
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
                    f"{path}, line {reader.line_num} has more cells than the {len(reader.fieldnames or ())} columns of the first line, "
                    "so they cannot be assigned to columns; fix or remove the line."
                )
            yield row
    except csv.Error as error:
        raise DataError(
            f"{path}, line {reader.line_num + 1} cannot be read ({error}), so it cannot be used; fix or remove the line."
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
            f"{path}, line {number} is no JSON object ({error}), so it cannot be used; fix or remove the line."
        ) from error
