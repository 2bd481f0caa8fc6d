"""Resolution of all sources of settings, in order of precedence: code, flag, environment, file, default."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, cast

from hasten.config.base import Section, fit
from hasten.config.checks import find_contradictions, settle_choices
from hasten.config.established import VARIABLES, from_established_environment
from hasten.config.layers import Problems, from_code, from_environment, unknown_setting
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
        setting_path = tuple(name.split(".")) if isinstance(name, str) else name
        entry = self.entries.get(setting_path)
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
    `env` is the environment, and `handed` holds the launcher's entries (`handoff.unpack_settings`).
    Raises: ConfigError for unknown, mistyped or contradictory settings; several problems are listed at once.
    """
    problems = Problems()
    variables = env or {}
    setting_entries: list[SettingEntry] = [*file, *flags]
    with problems.catching():
        setting_entries += from_environment(variables)
        if not VARIABLES.isdisjoint(variables):
            setting_entries += from_established_environment(variables)
    with problems.catching():
        setting_entries += from_code(code or {})
    if handed:
        setting_entries += _not_read_here(handed, setting_entries)
    decoded_entries, translation_notes = decode_all(setting_entries, problems)
    winning_entries, overridden_entries = merge_entries(decoded_entries, problems)
    problems.settle()
    winning_entries, overridden_entries, choice_notes = settle_choices(
        winning_entries, overridden_entries, problems
    )
    problems.settle()
    config = cast(
        Config,
        build_section(
            Config,
            (),
            {
                setting_path: entry.value
                for setting_path, entry in winning_entries.items()
            },
        ),
    )
    resolved = Resolved(
        config,
        MappingProxyType(winning_entries),
        MappingProxyType(overridden_entries),
        (*notes, *translation_notes, *choice_notes),
    )
    for contradiction in find_contradictions(config, winning_entries):
        problems.add(contradiction)
    problems.settle()
    return resolved


def _not_read_here(
    handed: Iterable[SettingEntry], setting_entries: Sequence[SettingEntry]
) -> list[SettingEntry]:
    """Return the launcher's entries without those of variables that this process reads itself: they may have changed."""
    read_here = {
        entry.path for entry in setting_entries if entry.source.kind == "environment"
    }
    return [
        entry
        for entry in handed
        if entry.source.kind != "environment" or entry.path not in read_here
    ]


def decode_all(
    setting_entries: Iterable[SettingEntry], problems: Problems
) -> tuple[list[SettingEntry], list[str]]:
    """Return the entries translated to current names with typed values, and notes about the translation."""
    decoded_entries: list[SettingEntry] = []
    notes: list[str] = []
    for raw_entry in setting_entries:
        with problems.catching():
            translated_entries = [raw_entry]
            if raw_entry.path[0] == "fsdp":
                translated_entries, sentences = translate(raw_entry)
                notes += [sentence for sentence in sentences if sentence not in notes]
            for entry in translated_entries:
                info = BY_PATH.get(entry.path)
                if info is None:
                    raise unknown_setting(str(entry.source), entry.path)
                value = fit(
                    info.owner, entry.path[-1], entry.value, entry, text=entry.text
                )
                decoded_entries.append(replace(entry, value=value))
    return decoded_entries, notes


def merge_entries(
    setting_entries: Iterable[SettingEntry], problems: Problems
) -> tuple[dict[Path, SettingEntry], dict[Path, tuple[SettingEntry, ...]]]:
    """Return the entry of the strongest source for each setting, and the entries it replaced."""
    by_path: dict[Path, list[SettingEntry]] = {}
    for entry in setting_entries:
        by_path.setdefault(entry.path, []).append(entry)
    winning_entries: dict[Path, SettingEntry] = {}
    overridden_entries: dict[Path, tuple[SettingEntry, ...]] = {}
    for setting_path, rival_entries in by_path.items():
        if len(rival_entries) == 1:
            winning_entries[setting_path] = rival_entries[0]
            continue
        ranked_entries = sorted(
            rival_entries,
            key=lambda entry: (entry.source.level, not entry.weak),
            reverse=True,
        )
        strongest_entry = ranked_entries[0]
        for weaker_entry in ranked_entries[1:]:
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
        winning_entries[setting_path] = strongest_entry
        overridden_entries[setting_path] = tuple(ranked_entries[1:])
    return winning_entries, overridden_entries


def build_section(
    cls: type[Section], path: Path, values: Mapping[Path, Any]
) -> Section:
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
            arguments[child_path[-1]] = build_section(section, child_path, values)
    return cls(**arguments)
