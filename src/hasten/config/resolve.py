"""Settings from all sources: entries of a file, the environment and code, and their resolution in order of precedence: code, flag, environment, file, default."""

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any, Final, cast

from hasten.config.base import Section, fit, given, kind_of
from hasten.config.checks import (
    Problems,
    find_contradictions,
    nearest_name,
    settle_choices,
)
from hasten.config.established import VARIABLES, from_established_environment
from hasten.config.legacy import OLD_NAMES, translate
from hasten.config.root import Config
from hasten.config.schema import (
    BY_PATH,
    BY_VARIABLE,
    FIELDS,
    SECTIONS,
    VARIABLE_PREFIX,
    section_at,
)
from hasten.config.sections.loop import (
    AORecipeKwargs,
    TERecipeKwargs,
)
from hasten.config.sections.trust import TrustSettings
from hasten.config.source import (
    DEFAULT,
    Marked,
    Path,
    SettingEntry,
    SettingSource,
    dotted_name,
    shown,
)
from hasten.errors import (
    ConfigError,
    ContradictionError,
    HastenWarning,
    SettingValueError,
    UnknownSettingError,
)

ARGUMENTS: Final = MappingProxyType[str, Path](
    {
        cls.section_names.argument: path
        for path, cls in SECTIONS.items()
        if cls.section_names.argument
    }
    | {
        "gradient_accumulation_steps": ("gradient_accumulation", "num_steps"),
        "dynamo_backend": ("dynamo", "backend"),
        "project_dir": ("project", "project_dir"),
        "split_batches": ("dataloader", "split_batches"),
        "log_with": ("tracking", "log_with"),
    }
)
"""Arguments of the Accelerator that take a section, or a setting inside one."""

OTHER_VARIABLES: Final = frozenset(
    VARIABLE_PREFIX + name
    for name in (
        *("CONFIG", "DEBUG", "HOME", "LOG_LEVEL", "TOKEN"),
        # set by the launcher
        *("LAUNCHER_PID", "MEMORY_FOLDER", "PARENT_PID", "VERDICT_FILE"),
    )
)
"""Variables of hasten that are not settings."""

HANDLERS: Final = MappingProxyType[type[Section], Path](
    {cls: path for path, cls in SECTIONS.items() if cls.section_names.is_handler}
)
"""Section of each settings class in `kwargs_handlers`."""

MOVED: Final = frozenset(
    {
        *(name for name in Config.__dataclass_fields__ if section_at((name,))),
        *TrustSettings.__dataclass_fields__,
    }
).difference(ARGUMENTS)
"""Names that only files, flags and variables use; code has another spelling for them."""


def first_names(names: Sequence[str]) -> str:
    """Return the first few names, to limit the length of a message."""
    return ", ".join(names[:4]) + (", … (see docs/config.md)" if len(names) > 4 else "")


def unknown_setting(source_text: str, setting_path: Path) -> UnknownSettingError:
    """Return the error for a path that the schema does not have, with the nearest name or the right section."""
    section = section_at(setting_path[:-1])
    siblings = tuple(section.__dataclass_fields__) if section else ()
    full_names = [
        info.name
        for info in FIELDS
        if info.path[-1] == setting_path[-1] or info.flag == setting_path[-1]
    ]
    if similar_name := nearest_name(setting_path[-1], siblings):
        hint = f"did you mean {dotted_name((*setting_path[:-1], similar_name))!r}?"
    elif full_names:
        hint = f"it belongs under {full_names[0]!r}."
    elif similar_setting := nearest_name(
        setting_path[-1], {info.path[-1] for info in FIELDS}
    ):
        hint = f"did you mean {next(i.name for i in FIELDS if i.path[-1] == similar_setting)!r}?"
    else:
        hint = f"known here are {first_names(siblings)}."
    return UnknownSettingError(
        f"{source_text}: unknown setting {dotted_name(setting_path)!r}, which would have no effect; {hint}"
    )


def argument_names() -> tuple[str, ...]:
    """Return the names of all settings that an Accelerator takes as arguments."""
    single = (
        setting_name
        for setting_name in Config.__dataclass_fields__
        if section_at((setting_name,)) is None
    )
    return (*ARGUMENTS, *single, "kwargs_handlers")


def unknown_argument(setting_name: str) -> UnknownSettingError:
    """Return the error for an unknown argument of the Accelerator, with the nearest one."""
    setting_source = SettingSource("code", setting_name)
    if similar_name := nearest_name(setting_name, argument_names()):
        return UnknownSettingError(
            f"{setting_source}: unknown setting {setting_name!r}, which would have no effect; did you mean {similar_name!r}?"
        )
    return unknown_setting(str(setting_source), (setting_name,))


def from_tree(tree: Marked, file: str, problems: Problems) -> list[SettingEntry]:
    """Return the entries of a hasten settings file; every unknown key becomes a problem with file and line."""
    return list(_flatten_tree(tree, file, (), problems))


def _flatten_tree(
    tree: Marked, file: str, setting_path: Path, problems: Problems
) -> Iterator[SettingEntry]:
    for key, marked_value in tree.value.items():
        item_path = (*setting_path, key)
        line_text = f"{file}:{marked_value.line}"
        if section := section_at(item_path):
            word_fields = section.section_names.word_fields
            if word_fields and isinstance(marked_value.value, str | bool):
                for setting_name in word_fields:
                    yield SettingEntry(
                        (*item_path, setting_name),
                        marked_value.plain(),
                        SettingSource("file", line_text),
                    )
            elif isinstance(marked_value.value, Mapping):
                yield from _flatten_tree(marked_value, file, item_path, problems)
            elif marked_value.value is not None:
                problems.add(_not_a_section(line_text, item_path, marked_value))
        elif item_path in BY_PATH or (setting_path == ("fsdp",) and key in OLD_NAMES):
            if item_path in BY_PATH and BY_PATH[item_path].meta.code_only:
                problems.add(
                    UnknownSettingError(
                        f"{line_text}: {dotted_name(item_path)!r} holds a Python object; set it in code."
                    )
                )
            else:
                yield SettingEntry(
                    item_path, marked_value.plain(), SettingSource("file", line_text)
                )
        elif problems.worth_a_hint:
            problems.add(unknown_setting(line_text, item_path))
        else:
            problems.add(
                UnknownSettingError(
                    f"{line_text}: unknown setting {dotted_name(item_path)!r}, which would have no effect."
                )
            )


def _not_a_section(
    line_text: str, setting_path: Path, marked_value: Marked
) -> ConfigError:
    cls = section_at(setting_path)
    names = first_names(tuple(cls.__dataclass_fields__)) if cls else ""
    return SettingValueError(
        f"{line_text}: {dotted_name(setting_path)!r} is a section, but {shown(marked_value.plain())} is given; write its settings below it: {names}."
    )


def from_environment(env: Mapping[str, str]) -> list[SettingEntry]:
    """Return the entries of hasten's environment variables, HASTEN_<FLAG>; warn of unknown ones, unless the launcher has.

    Raises: UnknownSettingError for a variable that is almost spelled like one of hasten's.
    """
    setting_entries = []
    for setting_name, setting_value in env.items():
        if not setting_name.startswith(VARIABLE_PREFIX) or not setting_value.strip():
            continue  # an empty variable counts as unset
        if info := BY_VARIABLE.get(setting_name):
            setting_entries.append(
                SettingEntry(
                    info.path,
                    setting_value,
                    SettingSource("environment", setting_name),
                    text=True,
                )
            )
        elif similar_variables := get_close_matches(
            setting_name, BY_VARIABLE, n=1, cutoff=0.93
        ):
            # Variables of other tools may share the prefix; only a likely typo is refused.
            raise UnknownSettingError(
                f"environment {setting_name}={setting_value}: unknown variable, which would have no effect; did you mean {similar_variables[0]}?"
            )
        elif (
            setting_name not in OTHER_VARIABLES
            and "TEST" not in setting_name
            and "HASTEN_CONFIG" not in env
        ):
            warnings.warn(_unknown_variable(setting_name), HastenWarning, stacklevel=2)
    return setting_entries


def _unknown_variable(setting_name: str) -> str:
    """Return the warning about a variable that hasten does not read, with the nearest one that it does."""
    variable_names = [*BY_VARIABLE, *sorted(OTHER_VARIABLES)]
    name_end = setting_name.removeprefix(VARIABLE_PREFIX)
    similar_variables = [
        variable for variable in variable_names if variable.endswith("_" + name_end)
    ]  # settings that have moved into a section
    if not similar_variables:
        similar_last_words = get_close_matches(
            name_end,
            [variable.removeprefix(VARIABLE_PREFIX) for variable in variable_names],
            n=1,
            cutoff=0.6,
        )
        similar_variables = [
            VARIABLE_PREFIX + variable for variable in similar_last_words
        ]
    if similar_variables:
        hint = f"did you mean {similar_variables[0]}? Otherwise unset it."
    else:
        hint = "unset it, or see docs/config.md for the names."
    return f"environment {setting_name}: hasten reads no variable of this name, so it has no effect; {hint}"


def from_code(arguments: Mapping[str, Any]) -> list[SettingEntry]:
    """Return the entries of arguments in code: settings by name, settings classes, and `kwargs_handlers`.

    An argument that is None counts as not given. A settings class contributes its explicitly passed fields.
    Raises: UnknownSettingError for an unknown name or class.
    """
    setting_entries: list[SettingEntry] = []
    for setting_name, setting_value in arguments.items():
        if setting_value is None:
            continue
        if setting_name == "kwargs_handlers":
            setting_entries += _from_handlers(setting_value)
            continue
        setting_path = ARGUMENTS.get(setting_name) or tuple(setting_name.split("."))
        if setting_name in MOVED:
            raise _moved_setting(setting_name, setting_value)
        if (
            len(setting_path) == 1
            and setting_path[0] not in Config.__dataclass_fields__
        ):
            raise unknown_argument(setting_name)
        if setting_name == "log_with":
            if isinstance(setting_value, (list, tuple, set)):
                trackers = setting_value
            else:
                trackers = [setting_value]
            # instances are not settings
            setting_value = [
                marked_value
                for marked_value in trackers
                if isinstance(marked_value, str)
            ]
        setting_entries += _from_value(
            setting_path, setting_value, SettingSource("code", setting_name)
        )
    return setting_entries


def spelled_in_code(setting_path: Path, field_sources: str = "...") -> str:
    """Return the argument of an Accelerator for a section or setting of the schema, with `inside` as its fields."""
    if setting_path[0] in TrustSettings.__dataclass_fields__:
        return spelled_in_code(("trust",), f"{setting_path[0]}={field_sources}")
    cls = getattr(section_at(setting_path), "__name__", "")
    for argument, argument_path in ARGUMENTS.items():
        if argument_path == setting_path:
            return f"{argument}={cls}({field_sources})"
    if setting_path in HANDLERS.values():
        return f"kwargs_handlers=[{cls}({field_sources})]"
    return "it in a settings file, or as a flag of `hasten launch`"


def _moved_setting(setting_name: str, setting_value: Any) -> UnknownSettingError:
    return UnknownSettingError(
        f"Accelerator({setting_name}={shown(setting_value)}): {setting_name!r} is not an argument, so it would have no effect; "
        f"write {spelled_in_code((setting_name,))}."
    )


def _from_value(
    setting_path: Path, setting_value: Any, setting_source: SettingSource
) -> list[SettingEntry]:
    if setting_path in BY_PATH:
        return [SettingEntry(setting_path, setting_value, setting_source)]
    cls = section_at(setting_path)
    if cls is None:
        raise unknown_setting(str(setting_source), setting_path)
    if cls.section_names.word_fields and isinstance(setting_value, str):
        return [
            SettingEntry((*setting_path, setting_name), setting_value, setting_source)
            for setting_name in cls.section_names.word_fields
        ]
    field_sources = {
        setting_name: SettingSource(
            setting_source.kind, f"{setting_source.detail}.{setting_name}"
        )
        for setting_name in cls.__dataclass_fields__
    }
    if isinstance(setting_value, Mapping):
        return [
            entry
            for setting_name, marked_value in setting_value.items()
            for entry in _from_value(
                (*setting_path, setting_name),
                marked_value,
                field_sources.get(setting_name, setting_source),
            )
        ]
    if not isinstance(setting_value, cls):
        raise ConfigError(
            f"{setting_source}: {type(setting_value).__name__} was given; give a {cls.__name__} or a mapping."
        )
    setting_entries = [
        entry
        for setting_name in sorted(given(setting_value))
        for entry in _from_value(
            (*setting_path, setting_name),
            getattr(setting_value, setting_name),
            field_sources[setting_name],
        )
    ]
    if cls.section_names.strategy:
        setting_entries.append(
            SettingEntry(
                ("strategy",), cls.section_names.strategy, setting_source, weak=True
            )
        )
    return setting_entries


def _from_handlers(handlers: Any) -> list[SettingEntry]:
    if not isinstance(handlers, Iterable) or isinstance(
        handlers, str | bytes | Mapping
    ):
        raise SettingValueError(
            f"kwargs_handlers={handlers!r}: got {kind_of(handlers)}, expected a list of settings classes, so it is unclear which settings "
            f"are meant; write for example kwargs_handlers=[AutocastKwargs(...)]."
        )
    seen_kinds: set[type] = set()
    setting_entries: list[SettingEntry] = []
    for handler in handlers:
        handler_class = next(
            (cls for cls in HANDLERS if isinstance(handler, cls)), None
        )
        if handler_class is None:
            known_names = ", ".join(cls.__name__ for cls in HANDLERS)
            setting_name = type(handler).__name__
            raise UnknownSettingError(
                f"kwargs_handlers holds {setting_name}, which is not a settings class; known are {known_names}."
            )
        if handler_class in seen_kinds:
            raise ContradictionError(
                f"kwargs_handlers holds {handler_class.__name__} twice; only one could count, keep one."
            )
        seen_kinds.add(handler_class)
        setting_source = SettingSource("code", handler_class.__name__)
        setting_entries += _from_value(HANDLERS[handler_class], handler, setting_source)
        if handler_class in (AORecipeKwargs, TERecipeKwargs):
            setting_entries.append(
                SettingEntry(
                    ("fp8", "backend"),
                    "ao" if handler_class is AORecipeKwargs else "te",
                    setting_source,
                    weak=True,
                )
            )
    return setting_entries


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
        setting_entries += _without_own_variables(handed, setting_entries)
    decoded_entries, translation_notes = decode_all(setting_entries, problems)
    winning_entries, overridden_entries = merge_entries(decoded_entries, problems)
    problems.settle()
    winning_entries, overridden_entries, choice_notes = settle_choices(
        winning_entries, overridden_entries, problems
    )
    problems.settle()
    values = {}
    for setting_path, entry in winning_entries.items():
        values[setting_path] = entry.value
    config = cast(Config, build_section(Config, (), values))
    for contradiction in find_contradictions(config, winning_entries):
        problems.add(contradiction)
    problems.settle()
    return Resolved(
        config,
        MappingProxyType(winning_entries),
        MappingProxyType(overridden_entries),
        (*notes, *translation_notes, *choice_notes),
    )


def _without_own_variables(
    handed: Iterable[SettingEntry], setting_entries: Sequence[SettingEntry]
) -> list[SettingEntry]:
    """Return the launcher's entries without those of variables that this process reads itself: they may have changed."""
    own_variable_paths = {
        entry.path for entry in setting_entries if entry.source.kind == "environment"
    }
    return [
        entry
        for entry in handed
        if entry.source.kind != "environment" or entry.path not in own_variable_paths
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
