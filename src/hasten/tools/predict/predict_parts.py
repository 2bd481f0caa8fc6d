"""What `hasten predict` has done so far: finished batches in a folder beside the output, and the output in one rename."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from hasten.errors import ConfigError, DataError

_MOST_PARTS: Final = 512
_JOB: Final = "job.json"

# Any in this file: the facts of a job and the results are JSON values.


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of an output: whole batches each, cut the same way on any number of processes."""

    output: Path
    num_rows: int
    batch_size: int

    @property
    def folder(self) -> Path:
        """Where finished parts wait for the others."""
        return self.output.with_name(f"{self.output.name}.parts")

    @property
    def rows_per_part(self) -> int:
        """Rows of every part but the last: one batch, or more where that would make too many files."""
        num_batches = -(-self.num_rows // self.batch_size)
        return self.batch_size * max(-(-num_batches // _MOST_PARTS), 1)

    @property
    def count(self) -> int:
        """The number of parts."""
        return -(-self.num_rows // self.rows_per_part)

    def batches(self, part: int) -> list[range]:
        """The rows of each batch of a part."""
        first, last = part * self.rows_per_part, min((part + 1) * self.rows_per_part, self.num_rows)
        return [range(begin, min(begin + self.batch_size, last)) for begin in range(first, last, self.batch_size)]

    def missing(self) -> list[int]:
        """The parts that are not there yet."""
        return [part for part in range(self.count) if not self._path(part).exists()]

    def begin(self, job: Mapping[str, Any]) -> str:
        """Keep the parts of the same job, remove those of another; says which facts differed. Ranks: main only."""
        text = json.dumps(dict(job), sort_keys=True)
        record = self.folder / _JOB
        differing = ""
        if self.folder.exists():
            known = _facts(record)
            differing = ", ".join(sorted(name for name in {*known, *job} if known.get(name) != job.get(name)))
            if differing:
                shutil.rmtree(self.folder)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_whole(record, text + "\n")
        except OSError as error:
            raise ConfigError(
                f"--output={self.output} cannot be written ({error.strerror}), so there is no place for the results; give a file in a folder that "
                "you may write to."
            ) from error
        return differing

    def finish(self, part: int, results: Sequence[Any]) -> None:
        """Keep the results of a part, one line each."""
        write_whole(self._path(part), "".join(f"{to_json(result)}\n" for result in results))

    def publish(self) -> None:
        """Make the output of all parts, in order, and remove them. Ranks: main only, when none is missing."""
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
    """What is known of an earlier job; nothing if it was interrupted while it wrote that down."""
    try:
        known = json.loads(record.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}


def write_whole(path: Path, text: str) -> None:
    """Write a file that is there as a whole or not at all, also when the machine stops."""
    draft = path.with_name(f".{path.name}.draft")
    with draft.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)


def to_json(result: Any) -> str:
    """A result as one line of JSON; what is no object becomes the value of `prediction`."""
    return json.dumps(
        result if isinstance(result, dict) else {"prediction": result}, default=_plain, ensure_ascii=False
    )


def _plain(value: Any) -> Any:
    """Arrays and tensors as lists."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise DataError(
        f"a result holds a {type(value).__name__}, which JSON does not know, so it cannot be written; return numbers, text, lists, dicts or tensors."
    )
