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

_MAX_PART_FILES: Final = 512
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
        return self.batch_size * max(-(-num_batches // _MAX_PART_FILES), 1)

    @property
    def count(self) -> int:
        """The number of parts."""
        return -(-self.num_rows // self.rows_per_part)

    def list_batches(self, part_number: int) -> list[range]:
        """Return the row ranges of the batches of a part."""
        first_row = part_number * self.rows_per_part
        end_row = min((part_number + 1) * self.rows_per_part, self.num_rows)
        batches = []
        for batch_start in range(first_row, end_row, self.batch_size):
            batches.append(
                range(batch_start, min(batch_start + self.batch_size, end_row))
            )
        return batches

    def missing_parts(self) -> list[int]:
        """Return the parts that are not finished."""
        missing_parts = []
        for part_number in range(self.count):
            if not self._part_path(part_number).exists():
                missing_parts.append(part_number)
        return missing_parts

    def begin_job(self, job: Mapping[str, Any]) -> str:
        """Reuse the parts of the same job, remove those of another; return the facts that differ. Ranks: main only."""
        text = json.dumps(dict(job), sort_keys=True)
        job_file = self.folder / _JOB
        changed_facts = ""
        if self.folder.exists():
            earlier_job = _read_job(job_file)
            changed_names = []
            for name in sorted({*earlier_job, *job}):
                if earlier_job.get(name) != job.get(name):
                    changed_names.append(name)
            changed_facts = ", ".join(changed_names)
            if changed_facts:
                shutil.rmtree(self.folder)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_atomically(job_file, text + "\n")
        except OSError as error:
            raise ConfigError(
                f"--output={self.output} cannot be written ({error.strerror}), so the results cannot be saved; give a file in a folder "
                "that "
                "you may write to."
            ) from error
        return changed_facts

    def finish_part(self, part_number: int, results: Sequence[Any]) -> None:
        """Write the results of a part, one per line."""
        write_atomically(
            self._part_path(part_number),
            "".join(f"{to_json(result)}\n" for result in results),
        )

    def publish_rows(self) -> None:
        """Join all parts in order into the output, and remove them. Ranks: main only, when none is missing."""
        draft_path = self.folder / "output"
        with draft_path.open("wb") as file:
            for part_number in range(self.count):
                file.write(self._part_path(part_number).read_bytes())
            file.flush()
            os.fsync(file.fileno())
        draft_path.replace(self.output)
        shutil.rmtree(self.folder)

    def _part_path(self, part_number: int) -> Path:
        return self.folder / f"{part_number:06d}.jsonl"


def _read_job(job_file: Path) -> dict[str, Any]:
    """Return the facts of an earlier job; empty if it was interrupted while writing them."""
    try:
        earlier_job = json.loads(job_file.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return earlier_job if isinstance(earlier_job, dict) else {}


def write_atomically(path: Path, text: str) -> None:
    """Write a file atomically, even if the machine stops."""
    draft_path = path.with_name(f".{path.name}.draft")
    with draft_path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    draft_path.replace(path)


def to_json(result: Any) -> str:
    """Return a result as one line of JSON; a value that is not a dict becomes the value of `prediction`."""
    record = result if isinstance(result, dict) else {"prediction": result}
    return json.dumps(
        record,
        default=_to_list,
        ensure_ascii=False,
    )


def _to_list(value: Any) -> Any:
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
            return [
                _decode_row(path, number, line)
                for number, line in _numbered_lines(path)
            ]
        case ".csv" | ".tsv":
            return list(_read_cells(path, "," if path.suffix == ".csv" else "\t"))
        case ".txt":
            return [{"text": line} for line in _read_text(path).splitlines()]
        case _:
            raise ConfigError(
                f"{path} ends neither in {' nor in '.join(KINDS)}, so its format is unknown; convert it to JSON lines, "
                "one object per row."
            )


def _read_text(path: Path) -> str:
    try:
        return path.read_text("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path} is not UTF-8 text (byte {error.object[error.start]:#04x} at {error.start}), so its rows cannot be read; save it as UTF-8."
        ) from error


def _read_cells(path: Path, delimiter: str) -> Iterator[dict[str, Any]]:
    reader = csv.DictReader(
        io.StringIO(_read_text(path), newline=""), delimiter=delimiter
    )
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


def _numbered_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    for number, line in enumerate(path.read_bytes().split(b"\n"), start=1):
        if line.strip():
            yield number, line


def _decode_row(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        return msgspec.json.decode(line, type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise DataError(
            f"{path}, line {number} is no JSON object ({error}), so it cannot be used; fix or remove the line."
        ) from error
