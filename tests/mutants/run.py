"""Count the one-token mutants that unit tests catch, among a seeded sample from the modules that decide.

A mutant is killed when one of the tests that execute its line fails or exceeds the time limit; only tests of its room
run, the quick ones first, in a forked child. Survivors are listed with file, line and change. `equivalent.toml` lists
mutants that no test can tell from the original, with reasons; they do not count.

    python -m tests.mutants.run --count 60 --room data
    python -m tests.mutants.run --at config/resolve.py:120
"""

from __future__ import annotations

import argparse
import functools
import importlib
import os
import random
import signal
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

from tests.mutants.children import (
    ALL_PASSED,
    NOTHING_RAN,
    Job,
    TestRecord,
    read_records,
    record_lines,
    run_jobs,
    run_mutant,
)
from tests.mutants.mutate import Mutant, mutants_of
from tests.mutants.rooms import ROOMS, SOURCE, Room

SCORE: Final = Path(__file__).with_name("score.md")
EQUIVALENT: Final = Path(__file__).with_name("equivalent.toml")
RECORDING_TIMEOUT_S: Final = 1200.0
START_TIMEOUT_S: Final = 60.0
TIMEOUT_FACTOR: Final = 5.0
"""Time limit of a mutant: that of the start, and this many times what its tests take unchanged."""
PRELOADED: Final = (
    "numpy",
    "torch",
    "torch.utils.data",
    "torch.distributed",
    "torch.distributed.tensor",
    "safetensors.torch",
    "msgspec",
    "yaml",
    "rich",
)
"""Packages imported once, before the fork; hasten is imported by each child, since one of its modules differs."""


class Outcome(StrEnum):
    """End of a mutant."""

    KILLED = "killed"
    TIMED_OUT = "killed by time limit"
    SURVIVED = "survived"
    NOT_EXECUTED = "survived, no test executes the line"
    EQUIVALENT = "equivalent"


KILLED: Final = frozenset({Outcome.KILLED, Outcome.TIMED_OUT})
SURVIVED: Final = frozenset({Outcome.SURVIVED, Outcome.NOT_EXECUTED})


@dataclass(frozen=True, slots=True)
class Verdict:
    """A mutant and its end."""

    mutant: Mutant
    outcome: Outcome
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Equivalent:
    """A mutant that no test can tell from the original."""

    file: str
    function: str
    change: str
    reason: str

    def matches(self, mutant: Mutant) -> bool:
        """Return True if this entry describes the mutant."""
        return (self.file, self.function, self.change) == (
            file_of(mutant),
            mutant.function,
            mutant.change,
        )


@dataclass(frozen=True, slots=True)
class Score:
    """Verdicts of a run, in the order of files and lines."""

    verdicts: tuple[Verdict, ...]
    equivalents: tuple[Equivalent, ...]

    def count(self, outcomes: Iterable[Outcome], file: str | None = None) -> int:
        """Return the number of mutants that ended so, of one file or of all."""
        chosen_outcomes = set(outcomes)
        return sum(
            verdict.outcome in chosen_outcomes
            for verdict in self.verdicts
            if file in (None, file_of(verdict.mutant))
        )

    def share(self) -> float:
        """Return the share of killed mutants among those that are not equivalent."""
        num_killed = self.count(KILLED)
        return num_killed / max(num_killed + self.count(SURVIVED), 1)


def file_of(mutant: Mutant) -> str:
    """Return a mutant's file below the package, as it is listed."""
    if not mutant.path.is_relative_to(SOURCE):
        return mutant.path.name
    return str(mutant.path.relative_to(SOURCE / "hasten"))


def title_of(mutant: Mutant) -> str:
    """Return file, line, function and change of a mutant."""
    change = " ".join(mutant.change.split())
    return f"{file_of(mutant)}:{mutant.line} {mutant.function}: {change}"


def sample_mutants(
    rooms: Mapping[str, Room], count: int, seed: int
) -> dict[str, list[Mutant]]:
    """Return a seeded sample by room, in which a module has its share of all mutants."""
    candidates = [
        (name, mutant)
        for name, room in rooms.items()
        for path in room.modules.values()
        for mutant in mutants_of(path)
    ]
    chosen = random.Random(seed).sample(candidates, min(count, len(candidates)))
    return {
        name: [mutant for room_name, mutant in chosen if room_name == name]
        for name in rooms
    }


def mutants_at(
    rooms: Mapping[str, Room], positions: Sequence[tuple[str, int]]
) -> dict[str, list[Mutant]]:
    """Return all mutants of some lines by room."""
    return {
        name: [
            mutant
            for path in room.modules.values()
            for mutant in mutants_of(path)
            if (file_of(mutant), mutant.line) in positions
        ]
        for name, room in rooms.items()
    }


def read_equivalents(path: Path) -> tuple[Equivalent, ...]:
    """Return the entries of a TOML file."""
    entries = tomllib.loads(path.read_text("utf-8")).get("mutant", [])
    return tuple(Equivalent(**entry) for entry in entries)


def _check_equivalents(equivalents: Sequence[Equivalent]) -> None:
    """Print the entries that no longer describe a mutant."""
    mutants = [
        mutant
        for room in ROOMS.values()
        for path in room.modules.values()
        for mutant in mutants_of(path)
    ]
    for equivalent in equivalents:
        if not any(equivalent.matches(mutant) for mutant in mutants):
            say(
                f"{EQUIVALENT.name}: no mutant is {equivalent.file} {equivalent.change}"
            )


def judge_rooms(
    rooms: Mapping[str, Room],
    mutants: Mapping[str, Sequence[Mutant]],
    equivalents: Sequence[Equivalent],
    num_workers: int,
) -> Score:
    """Record which tests execute which lines, then run every mutant; print each outcome."""
    verdicts = [
        Verdict(mutant, Outcome.EQUIVALENT)
        for room_mutants in mutants.values()
        for mutant in room_mutants
        if any(equivalent.matches(mutant) for equivalent in equivalents)
    ]
    settled = {verdict.mutant for verdict in verdicts}
    open_mutants = {
        name: [mutant for mutant in room_mutants if mutant not in settled]
        for name, room_mutants in mutants.items()
    }
    records = _record_rooms(
        {name: rooms[name] for name in rooms if open_mutants[name]}, num_workers
    )
    jobs = []
    for name, room_mutants in open_mutants.items():
        for mutant in room_mutants:
            covering_records = _covering(mutant, records[name])
            if covering_records:
                module = _module_of(mutant, rooms[name])
                jobs.append(_mutant_job(mutant, module, covering_records))
            else:
                verdicts.append(Verdict(mutant, Outcome.NOT_EXECUTED))
    for number, ending in enumerate(run_jobs(jobs, num_workers), 1):
        outcome = _outcome_of(ending.exit_code)
        verdicts.append(Verdict(ending.subject, outcome, ending.seconds))
        say(
            f"[{number:3}/{len(jobs)}] {ending.seconds:5.1f} s  {outcome:8}  "
            f"{title_of(ending.subject)}"
        )
    verdicts.sort(key=lambda verdict: (verdict.mutant.path, verdict.mutant.index))
    return Score(tuple(verdicts), tuple(equivalents))


def _record_rooms(
    rooms: Mapping[str, Room], num_workers: int
) -> dict[str, list[TestRecord]]:
    """Return the records of each room's passing tests. Raises: SystemExit if pytest could not run a room's tests."""
    records = {}
    with tempfile.TemporaryDirectory() as folder:
        outputs = {name: Path(folder) / f"{name}.json" for name in rooms}
        jobs = [
            Job(
                name,
                functools.partial(
                    record_lines, room.tests, room.modules.values(), outputs[name]
                ),
                RECORDING_TIMEOUT_S,
            )
            for name, room in rooms.items()
        ]
        for ending in run_jobs(jobs, num_workers):
            name = ending.subject
            if ending.exit_code != ALL_PASSED:
                raise SystemExit(f"the tests of {name} do not run:\n{ending.log}")
            all_records = read_records(outputs[name])
            records[name] = [record for record in all_records if record.has_passed]
            say(
                f"{name}: {len(records[name])} tests pass unchanged, "
                f"in {ending.seconds:.0f} s"
            )
            for record in all_records:
                if record.has_failed:
                    say(f"{name}: left out, fails without a mutant: {record.name}")
    return records


def _covering(mutant: Mutant, records: Sequence[TestRecord]) -> list[TestRecord]:
    """Return the records of tests that execute the changed line, or any of the module where it runs on import."""
    path = str(mutant.path)
    return [
        record
        for record in records
        if path in record.lines
        and (not mutant.lines or not mutant.lines.isdisjoint(record.lines[path]))
    ]


def _mutant_job(
    mutant: Mutant, module: str, records: Sequence[TestRecord]
) -> Job[Mutant]:
    seconds = sum(record.seconds for record in records)
    return Job(
        mutant,
        functools.partial(run_mutant, mutant, module, records),
        START_TIMEOUT_S + TIMEOUT_FACTOR * seconds,
    )


def _module_of(mutant: Mutant, room: Room) -> str:
    return next(name for name, path in room.modules.items() if path == mutant.path)


def _outcome_of(exit_code: int | None) -> Outcome:
    if exit_code is None:
        return Outcome.TIMED_OUT
    # tests of other parameters ran if none has its recorded name: nothing was seen
    if exit_code in (ALL_PASSED, NOTHING_RAN):
        return Outcome.SURVIVED
    return Outcome.KILLED


def report(score: Score, seed: int, command: str) -> str:
    """Return the score by module, the survivors and the equivalent mutants as Markdown."""
    verdicts = score.verdicts
    lines = [
        "# Mutants",
        "",
        f"Made by `{command}` (seed {seed}): one-token mutants of the modules that decide, "
        "and how many of them the unit tests of their room kill.",
        "",
        "| module | mutants | killed | of these by time limit | equivalent | survived |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    files = sorted({file_of(verdict.mutant) for verdict in verdicts})
    rows: list[tuple[str, str | None]] = [(file, file) for file in files]
    for title, file in [*rows, ("all", None)]:
        counts = (
            score.count(Outcome, file),
            score.count(KILLED, file),
            score.count([Outcome.TIMED_OUT], file),
            score.count([Outcome.EQUIVALENT], file),
            score.count(SURVIVED, file),
        )
        lines.append(f"| {title} | {' | '.join(map(str, counts))} |")
    lines += ["", f"Killed of those that are not equivalent: {score.share():.1%}.", ""]
    survivors = [verdict for verdict in verdicts if verdict.outcome in SURVIVED]
    lines += ["## Survivors", ""]
    lines += [
        f"- `{title_of(verdict.mutant)}` ({verdict.outcome})" for verdict in survivors
    ] or ["None."]
    lines += ["", "## Equivalent", ""]
    lines += [
        f"- `{title_of(verdict.mutant)}`: {_reason(verdict.mutant, score.equivalents)}"
        for verdict in verdicts
        if verdict.outcome == Outcome.EQUIVALENT
    ] or ["None."]
    return "\n".join(lines) + "\n"


def _reason(mutant: Mutant, equivalents: Sequence[Equivalent]) -> str:
    return next(
        equivalent.reason for equivalent in equivalents if equivalent.matches(mutant)
    )


def say(line: str) -> None:
    """Write a line at once."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a sample of mutants; return 1 if a smaller share than `--share` was killed."""
    args = _parse(arguments)
    rooms = {name: ROOMS[name] for name in args.room or ROOMS}
    equivalents = read_equivalents(EQUIVALENT)
    if args.at:
        mutants = mutants_at(rooms, args.at)
    else:
        mutants = sample_mutants(rooms, args.count, args.seed)
    if not args.room:
        _check_equivalents(equivalents)
    num_mutants = sum(map(len, mutants.values()))
    if not num_mutants:
        raise SystemExit("there is no mutant at these lines: give FILE:LINE as listed")
    say(f"{num_mutants} mutants, {args.workers} at a time")
    # the children are ended on the way out
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    for package in PRELOADED:
        importlib.import_module(package)
    started = time.monotonic()
    score = judge_rooms(rooms, mutants, equivalents, args.workers)
    text = report(score, args.seed, _command(args))
    say(f"\n{text}\n{time.monotonic() - started:.0f} s")
    if args.write is not None:
        args.write.write_text(text, encoding="utf-8")
    return int(score.share() < args.share)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutants.run",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--count",
        type=_positive,
        default=300,
        help="mutants to run; all, if there are fewer (default: 300)",
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the sample (default: 0)"
    )
    parser.add_argument(
        "--room",
        action="append",
        choices=sorted(ROOMS),
        help="mutate modules of this room only; may be repeated",
    )
    parser.add_argument(
        "--at",
        action="append",
        type=_position,
        metavar="FILE:LINE",
        help="instead of a sample, run all mutants of this line; may be repeated",
    )
    parser.add_argument(
        "--workers",
        type=_positive,
        default=os.cpu_count() or 1,
        help="mutants at a time (default: one a core)",
    )
    parser.add_argument(
        "--share",
        type=_share,
        default=0.0,
        help="exit with 1 if a smaller share is killed, such as 0.95",
    )
    parser.add_argument(
        "--write",
        type=Path,
        nargs="?",
        const=SCORE,
        metavar="FILE",
        help="also write the score to a file (default: score.md beside this module)",
    )
    return parser.parse_args(arguments)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of at least 1")
    return int(text)


def _share(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number between 0 and 1")
    return share


def _position(text: str) -> tuple[str, int]:
    file, _, line = text.rpartition(":")
    if not file or not line.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not FILE:LINE")
    return file, int(line)


def _command(args: argparse.Namespace) -> str:
    rooms = "".join(f" --room {room}" for room in args.room or [])
    return f"python -m tests.mutants.run --count {args.count} --seed {args.seed}{rooms}"


if __name__ == "__main__":
    sys.exit(main())
