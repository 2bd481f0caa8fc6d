"""Resolution of all sources of settings, in order of precedence: code, flag, environment, file, default."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, cast

from hasten.config.base import Section, fit
from hasten.config.checks import contradictions, settle_choices
from hasten.config.established import VARIABLES, from_established_environment
from hasten.config.layers import Problems, from_code, from_environment, unknown
from hasten.config.legacy import translate
from hasten.config.root import Config
from hasten.config.schema import BY_PATH, SECTIONS
from hasten.config.source import DEFAULT, Path, SettingEntry, SettingSource, shown
from hasten.errors import ContradictionError


@dataclass(frozen=True, slots=True)
class Resolved:
    """Settings of a run, with the source of every value and notes."""

    config: Config
    entries: Mapping[Path, SettingEntry]
    """The winning entry of each setting that is not at its default, decoded."""
    shadowed: Mapping[Path, tuple[SettingEntry, ...]] = field(default_factory=dict)
    """Entries that a stronger source replaced."""
    notes: tuple[str, ...] = ()
    """Notes about translations and choices, to be logged once."""

    def source(self, name: str | Path) -> SettingSource:
        """Return the source of a setting's value, such as "fsdp.cpu_offload"."""
        path = tuple(name.split(".")) if isinstance(name, str) else name
        entry = self.entries.get(path)
        return entry.source if entry else DEFAULT


def resolve(
    *,
    code: Mapping[str, Any] | None = None,
    flags: Iterable[SettingEntry] = (),
    env: Mapping[str, str] | None = None,
    file: Iterable[SettingEntry] = (),
    handed: Iterable[SettingEntry] = (),
    notes: Sequence[str] = (),
) -> Resolved:
    """Return the effective settings from all sources.

    `code` maps argument names to values, `flags` and `file` are entries from the command line and from `files.read`,
    `env` is the environment, and `handed` holds the launcher's entries (`handoff.unpack`).
    Raises: ConfigError for unknown, mistyped or contradictory settings; several problems are listed at once.
    """
    problems = Problems()
    variables = env or {}
    entries: list[SettingEntry] = [*file, *flags]
    with problems.catching():
        entries += from_environment(variables)
        if not VARIABLES.isdisjoint(variables):
            entries += from_established_environment(variables)
    with problems.catching():
        entries += from_code(code or {})
    if handed:
        entries += _not_read_here(handed, entries)
    decoded, translation_notes = decode_all(entries, problems)
    winners, shadowed = merge(decoded, problems)
    problems.settle()
    winners, shadowed, choice_notes = settle_choices(winners, shadowed, problems)
    problems.settle()
    config = cast(
        Config,
        build(Config, (), {path: entry.value for path, entry in winners.items()}),
    )
    resolved = Resolved(
        config,
        MappingProxyType(winners),
        MappingProxyType(shadowed),
        (*notes, *translation_notes, *choice_notes),
    )
    for contradiction in contradictions(config, winners):
        problems.add(contradiction)
    problems.settle()
    return resolved


def _not_read_here(
    handed: Iterable[SettingEntry], entries: Sequence[SettingEntry]
) -> list[SettingEntry]:
    """Return the launcher's entries without those of variables that this process reads itself: they may have changed."""
    read_here = {entry.path for entry in entries if entry.source.kind == "environment"}
    return [
        entry
        for entry in handed
        if entry.source.kind != "environment" or entry.path not in read_here
    ]


def decode_all(
    entries: Iterable[SettingEntry], problems: Problems
) -> tuple[list[SettingEntry], list[str]]:
    """Return the entries translated to current names with typed values, and notes about the translation."""
    decoded: list[SettingEntry] = []
    notes: list[str] = []
    for raw_entry in entries:
        with problems.catching():
            translated = [raw_entry]
            if raw_entry.path[0] == "fsdp":
                translated, sentences = translate(raw_entry)
                notes += [sentence for sentence in sentences if sentence not in notes]
            for entry in translated:
                info = BY_PATH.get(entry.path)
                if info is None:
                    raise unknown(str(entry.source), entry.path)
                value = fit(
                    info.owner, entry.path[-1], entry.value, entry, text=entry.text
                )
                decoded.append(replace(entry, value=value))
    return decoded, notes


def merge(
    entries: Iterable[SettingEntry], problems: Problems
) -> tuple[dict[Path, SettingEntry], dict[Path, tuple[SettingEntry, ...]]]:
    """Return the entry of the strongest source for each setting, and the entries it replaced."""
    by_path: dict[Path, list[SettingEntry]] = {}
    for entry in entries:
        by_path.setdefault(entry.path, []).append(entry)
    winners: dict[Path, SettingEntry] = {}
    shadowed: dict[Path, tuple[SettingEntry, ...]] = {}
    for path, rivals in by_path.items():
        if len(rivals) == 1:
            winners[path] = rivals[0]
            continue
        ranked = sorted(
            rivals, key=lambda entry: (entry.source.level, not entry.weak), reverse=True
        )
        strongest_entry = ranked[0]
        for weaker_entry in ranked[1:]:
            if (weaker_entry.source.level, weaker_entry.weak) == (
                strongest_entry.source.level,
                strongest_entry.weak,
            ) and weaker_entry.value != strongest_entry.value:
                problems.add(
                    ContradictionError(
                        f"{strongest_entry.name}: {shown(strongest_entry.value)} ({strongest_entry.source}) contradicts {shown(weaker_entry.value)} "
                        f"({weaker_entry.source}): neither outranks the other; remove one."
                    )
                )
        winners[path] = strongest_entry
        shadowed[path] = tuple(ranked[1:])
    return winners, shadowed


def build(cls: type[Section], path: Path, values: Mapping[Path, Any]) -> Section:
    """Return a section built from the values below a path; other fields have their defaults."""
    arguments: dict[str, Any] = {}
    depth = len(path)
    for setting_path, value in values.items():
        if setting_path[:depth] != path:
            continue
        child_path = setting_path[: depth + 1]
        section = SECTIONS.get(child_path)
        if section is None:
            arguments[child_path[-1]] = value
        elif child_path[-1] not in arguments:
            arguments[child_path[-1]] = build(section, child_path, values)
    return cls(**arguments)
