"""Choices between settings that exclude each other: the stronger source decides, equals contradict."""

from dataclasses import replace
from types import MappingProxyType
from typing import Final

from hasten.config.layers import Problems
from hasten.config.schema import BY_PATH
from hasten.config.source import Entry, Path, shown
from hasten.errors import ContradictionError

Winners = dict[Path, Entry]
Shadowed = dict[Path, tuple[Entry, ...]]

PLACES: Final[tuple[Path, ...]] = (("cpu",), ("launch", "multi_gpu"), ("launch", "tpu"))
ENGINES: Final = MappingProxyType({"fsdp": "fsdp", "deepspeed": "deepspeed", "megatron": "megatron"})
"""Sections that belong to one strategy."""


def settle_choices(winners: Winners, shadowed: Shadowed, problems: Problems) -> tuple[Winners, Shadowed, list[str]]:
    """Return the entries after exclusive choices were made, and what was chosen, in words."""
    winners, shadowed, notes = dict(winners), dict(shadowed), list[str]()
    _settle_places(winners, shadowed, notes, problems)
    _infer_strategy(winners, notes)
    _settle_engines(winners, notes, problems)
    return winners, shadowed, notes


def _settle_places(winners: Winners, shadowed: Shadowed, notes: list[str], problems: Problems) -> None:
    """Keep one of cpu, multi_gpu and tpu: they say where training runs."""
    said = [winners[path] for path in PLACES if path in winners and winners[path].value]
    if len(said) < 2:
        return
    said.sort(key=lambda entry: (entry.source.level, not entry.weak), reverse=True)
    first = said[0]
    for other in said[1:]:
        if (other.source.level, other.weak) == (first.source.level, first.weak):
            problems.add(contradiction(first, other, "training runs in one place", "keep one"))
            continue
        del winners[other.path]
        shadowed[other.path] = (other, *shadowed.get(other.path, ()))
        notes.append(f"{first.name} ({first.source}) outranks {other.name} ({other.source})")


def _infer_strategy(winners: Winners, notes: list[str]) -> None:
    """Choose the strategy whose options were given, when none was named."""
    if ("strategy",) in winners and winners[("strategy",)].value != "auto":
        return
    # Left-over variables are too weak a hint to shard a model; files, flags and code are not.
    hints = [entry for entry in _engine_entries(winners) if entry.source.kind != "environment"]
    if len({entry.path[0] for entry in hints}) == 1:
        hint = hints[0]
        value = ENGINES[hint.path[0]]
        winners[("strategy",)] = replace(hint, path=("strategy",), value=value, said="strategy", weak=True)
        notes.append(f"strategy: {value} is chosen because {hint.spelled} is given ({hint.source})")
    elif len({entry.path[0] for entry in hints}) > 1:
        pass  # _settle_engines names the two
    elif (tpu := winners.get(("launch", "tpu"))) and tpu.value:
        winners[("strategy",)] = replace(tpu, path=("strategy",), value="xla", said="strategy", weak=True)


def _settle_engines(winners: Winners, notes: list[str], problems: Problems) -> None:
    """Refuse options of an engine that is not used; weaker sources (a file's spare section) only rest."""
    strategy = winners.get(("strategy",))
    hints = _engine_entries(winners)
    if strategy is None or strategy.value == "auto":
        first = next((entry for entry in hints if entry.source.kind != "environment"), None)
        for other in hints:
            if first and other.path[0] != first.path[0] and other.source.level == first.source.level:
                why = "one strategy trains a model"
                problems.add(contradiction(first, other, why, "remove one, or name the strategy"))
                return
        return
    for entry in hints:
        if ENGINES[entry.path[0]] == strategy.value or entry.source.kind == "environment":
            continue
        if entry.source.level >= strategy.source.level:
            why = f"{entry.path[0]} options have no effect under strategy {strategy.value}"
            problems.add(
                contradiction(strategy, entry, why, f"set strategy: {entry.path[0]} or remove {entry.spelled}")
            )
            return
        rest = f"{entry.path[0]} options of {entry.source} rest: strategy is {strategy.value} ({strategy.source})"
        if not any(note.startswith(f"{entry.path[0]} options") for note in notes):
            notes.append(rest)


def _engine_entries(winners: Winners) -> list[Entry]:
    return [
        entry
        for path, entry in winners.items()
        if path[0] in ENGINES and path in BY_PATH and entry.value != BY_PATH[path].default
    ]


def contradiction(first: Entry, second: Entry, why: str, remedy: str) -> ContradictionError:
    """Return the error for two settings that cannot both hold, naming both values and both sources."""
    return ContradictionError(
        f"{first.name}: {shown(first.value)} ({first.source}) contradicts {second.name}: {shown(second.value)} "
        f"({second.source}): {why}; {remedy}."
    )
