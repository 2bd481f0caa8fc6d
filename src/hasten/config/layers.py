"""Entries of settings from each source: a file's tree, the environment, arguments in code."""

import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any, Final

from hasten.config.base import Section, given, kind_of
from hasten.config.legacy import OLD_NAMES
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
    Marked,
    Path,
    SettingEntry,
    SettingSource,
    dotted,
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

_MOST_SHOWN: Final = 50


@dataclass(slots=True)
class Problems:
    """Collected errors in the settings, reported to the user all at once."""

    found: list[ConfigError] = field(default_factory=list)

    @property
    def worth_a_hint(self) -> bool:
        """True if the next problem will be shown, since finding the nearest name takes milliseconds."""
        return len(self.found) < _MOST_SHOWN

    def add(self, error: ConfigError) -> None:
        """Add one problem, or the several inside a collected one."""
        self.found.extend(error.problems or (error,))

    @contextmanager
    def catching(self) -> Iterator[None]:
        """Context manager that records a ConfigError raised in its block."""
        try:
            yield
        except ConfigError as error:
            self.add(error)

    def settle(self) -> None:
        """Raise the recorded problems: a single one as itself, several as one ConfigError that lists them."""
        if len(self.found) == 1:
            raise self.found[0]
        if self.found:
            self.found.sort(key=_line)
            lines = "\n".join(
                f"  {number}. {error}"
                for number, error in enumerate(self.found[:_MOST_SHOWN], start=1)
            )
            if (num_hidden := len(self.found) - _MOST_SHOWN) > 0:
                lines += f"\n  … and {num_hidden} more"
            raise ConfigError(
                f"{len(self.found)} settings are wrong:\n{lines}",
                problems=tuple(self.found),
            )


def _line(error: ConfigError) -> int:
    """Return the line number of the file at the start of a message; 0 for others."""
    line_match = re.match(r"[^\n]*?:(\d+): ", str(error))
    return int(line_match[1]) if line_match else 0


def nearest(name: str, names: Iterable[str]) -> str:
    """Return the most similar name, or an empty string if none is similar."""
    similar_names = get_close_matches(name.lower(), list(names), n=1, cutoff=0.6)
    return similar_names[0] if similar_names else ""


def some(names: Sequence[str]) -> str:
    """Return the first few names, to limit the length of a message."""
    return ", ".join(names[:4]) + (", … (see docs/config.md)" if len(names) > 4 else "")


def unknown(source_text: str, path: Path) -> UnknownSettingError:
    """Return the error for a path that the schema does not have, with the nearest name or the right section."""
    section = section_at(path[:-1])
    siblings = tuple(section.__dataclass_fields__) if section else ()
    full_names = [
        info.name
        for info in FIELDS
        if info.path[-1] == path[-1] or info.flag == path[-1]
    ]
    if similar_name := nearest(path[-1], siblings):
        hint = f"did you mean {dotted((*path[:-1], similar_name))!r}?"
    elif full_names:
        hint = f"it belongs under {full_names[0]!r}."
    elif similar_setting := nearest(path[-1], {info.path[-1] for info in FIELDS}):
        hint = f"did you mean {next(i.name for i in FIELDS if i.path[-1] == similar_setting)!r}?"
    else:
        hint = f"known here are {some(siblings)}."
    return UnknownSettingError(
        f"{source_text}: unknown setting {dotted(path)!r}, which would have no effect; {hint}"
    )


def arguments() -> tuple[str, ...]:
    """Return the names of all settings that an Accelerator takes as arguments."""
    single = (
        name for name in Config.__dataclass_fields__ if section_at((name,)) is None
    )
    return (*ARGUMENTS, *single, "kwargs_handlers")


def unknown_argument(name: str) -> UnknownSettingError:
    """Return the error for an unknown argument of the Accelerator, with the nearest one."""
    source = SettingSource("code", name)
    if similar_name := nearest(name, arguments()):
        return UnknownSettingError(
            f"{source}: unknown setting {name!r}, which would have no effect; did you mean {similar_name!r}?"
        )
    return unknown(str(source), (name,))


def from_tree(tree: Marked, file: str, problems: Problems) -> list[SettingEntry]:
    """Return the entries of a hasten settings file; every unknown key becomes a problem with file and line."""
    return list(_flatten(tree, file, (), problems))


def _flatten(
    tree: Marked, file: str, path: Path, problems: Problems
) -> Iterator[SettingEntry]:
    for key, item in tree.value.items():
        item_path, line_text = (*path, key), f"{file}:{item.line}"
        if section := section_at(item_path):
            word_fields = section.section_names.word_fields
            if word_fields and isinstance(item.value, str | bool):
                for name in word_fields:
                    yield SettingEntry(
                        (*item_path, name),
                        item.plain(),
                        SettingSource("file", line_text),
                    )
            elif isinstance(item.value, Mapping):
                yield from _flatten(item, file, item_path, problems)
            elif item.value is not None:
                problems.add(_not_a_section(line_text, item_path, item))
        elif item_path in BY_PATH or (path == ("fsdp",) and key in OLD_NAMES):
            if item_path in BY_PATH and BY_PATH[item_path].meta.code_only:
                problems.add(
                    UnknownSettingError(
                        f"{line_text}: {dotted(item_path)!r} holds a Python object; set it in code."
                    )
                )
            else:
                yield SettingEntry(
                    item_path, item.plain(), SettingSource("file", line_text)
                )
        elif problems.worth_a_hint:
            problems.add(unknown(line_text, item_path))
        else:
            problems.add(
                UnknownSettingError(
                    f"{line_text}: unknown setting {dotted(item_path)!r}, which would have no effect."
                )
            )


def _not_a_section(line_text: str, path: Path, item: Marked) -> ConfigError:
    cls = section_at(path)
    names = some(tuple(cls.__dataclass_fields__)) if cls else ""
    return SettingValueError(
        f"{line_text}: {dotted(path)!r} is a section, but {shown(item.plain())} is given; write its settings below it: {names}."
    )


def from_environment(env: Mapping[str, str]) -> list[SettingEntry]:
    """Return the entries of hasten's environment variables, HASTEN_<FLAG>; warn of unknown ones, unless the launcher has.

    Raises: UnknownSettingError for a variable that is almost spelled like one of hasten's.
    """
    entries = []
    for name, value in env.items():
        if not name.startswith(VARIABLE_PREFIX) or not value.strip():
            continue  # an empty variable counts as unset
        if info := BY_VARIABLE.get(name):
            entries.append(
                SettingEntry(
                    info.path, value, SettingSource("environment", name), text=True
                )
            )
        elif similar_variables := get_close_matches(
            name, BY_VARIABLE, n=1, cutoff=0.93
        ):
            # Variables of other tools may share the prefix; only a likely typo is refused.
            raise UnknownSettingError(
                f"environment {name}={value}: unknown variable, which would have no effect; did you mean {similar_variables[0]}?"
            )
        elif (
            name not in OTHER_VARIABLES
            and "TEST" not in name
            and "HASTEN_CONFIG" not in env
        ):
            warnings.warn(_unknown_variable(name), HastenWarning, stacklevel=2)
    return entries


def _unknown_variable(name: str) -> str:
    """Return the warning about a variable that hasten does not read, with the nearest one that it does."""
    variable_names, name_end = (
        [*BY_VARIABLE, *sorted(OTHER_VARIABLES)],
        name.removeprefix(VARIABLE_PREFIX),
    )
    similar_variables = [
        variable for variable in variable_names if variable.endswith("_" + name_end)
    ]  # settings that have moved into a section
    if not similar_variables:
        similar_ends = get_close_matches(
            name_end,
            [variable.removeprefix(VARIABLE_PREFIX) for variable in variable_names],
            n=1,
            cutoff=0.6,
        )
        similar_variables = [VARIABLE_PREFIX + variable for variable in similar_ends]
    hint = (
        f"did you mean {similar_variables[0]}? Otherwise unset it."
        if similar_variables
        else "unset it, or see docs/config.md for the names."
    )
    return f"environment {name}: hasten reads no variable of this name, so it has no effect; {hint}"


def from_code(arguments: Mapping[str, Any]) -> list[SettingEntry]:
    """Return the entries of arguments in code: settings by name, settings classes, and `kwargs_handlers`.

    An argument that is None counts as not given. A settings class contributes its explicitly passed fields.
    Raises: UnknownSettingError for an unknown name or class.
    """
    entries: list[SettingEntry] = []
    for name, value in arguments.items():
        if value is None:
            continue
        if name == "kwargs_handlers":
            entries += _handlers(value)
            continue
        path = ARGUMENTS.get(name) or tuple(name.split("."))
        if name in MOVED:
            raise _moved(name, value)
        if len(path) == 1 and path[0] not in Config.__dataclass_fields__:
            raise unknown_argument(name)
        if name == "log_with":
            trackers = value if isinstance(value, (list, tuple, set)) else [value]
            # instances are not settings
            value = [item for item in trackers if isinstance(item, str)]
        entries += _from_value(path, value, SettingSource("code", name))
    return entries


def spelled_in_code(path: Path, inside: str = "...") -> str:
    """Return the argument of an Accelerator for a section or setting of the schema, with `inside` as its fields."""
    if path[0] in TrustSettings.__dataclass_fields__:
        return spelled_in_code(("trust",), f"{path[0]}={inside}")
    cls = getattr(section_at(path), "__name__", "")
    for argument, argument_path in ARGUMENTS.items():
        if argument_path == path:
            return f"{argument}={cls}({inside})"
    if path in HANDLERS.values():
        return f"kwargs_handlers=[{cls}({inside})]"
    return "it in a settings file, or as a flag of `hasten launch`"


def _moved(name: str, value: Any) -> UnknownSettingError:
    return UnknownSettingError(
        f"Accelerator({name}={shown(value)}): {name!r} is not an argument, so it would have no effect; "
        f"write {spelled_in_code((name,))}."
    )


def _from_value(path: Path, value: Any, source: SettingSource) -> list[SettingEntry]:
    if path in BY_PATH:
        return [SettingEntry(path, value, source)]
    cls = section_at(path)
    if cls is None:
        raise unknown(str(source), path)
    if cls.section_names.word_fields and isinstance(value, str):
        return [
            SettingEntry((*path, name), value, source)
            for name in cls.section_names.word_fields
        ]
    inside = {
        name: SettingSource(source.kind, f"{source.detail}.{name}")
        for name in cls.__dataclass_fields__
    }
    if isinstance(value, Mapping):
        return [
            entry
            for name, item in value.items()
            for entry in _from_value((*path, name), item, inside.get(name, source))
        ]
    if not isinstance(value, cls):
        raise ConfigError(
            f"{source}: {type(value).__name__} was given; give a {cls.__name__} or a mapping."
        )
    entries = [
        entry
        for name in sorted(given(value))
        for entry in _from_value((*path, name), getattr(value, name), inside[name])
    ]
    if cls.section_names.strategy:
        entries.append(
            SettingEntry(("strategy",), cls.section_names.strategy, source, weak=True)
        )
    return entries


def _handlers(handlers: Any) -> list[SettingEntry]:
    if not isinstance(handlers, Iterable) or isinstance(
        handlers, str | bytes | Mapping
    ):
        raise SettingValueError(
            f"kwargs_handlers={handlers!r}: got {kind_of(handlers)}, expected a list of settings classes, so it is unclear which settings "
            f"are meant; write for example kwargs_handlers=[AutocastKwargs(...)]."
        )
    seen_kinds: set[type] = set()
    entries: list[SettingEntry] = []
    for handler in handlers:
        kind = next((cls for cls in HANDLERS if isinstance(handler, cls)), None)
        if kind is None:
            known_names, name = (
                ", ".join(cls.__name__ for cls in HANDLERS),
                type(handler).__name__,
            )
            raise UnknownSettingError(
                f"kwargs_handlers holds {name}, which is not a settings class; known are {known_names}."
            )
        if kind in seen_kinds:
            raise ContradictionError(
                f"kwargs_handlers holds {kind.__name__} twice; only one could count, keep one."
            )
        seen_kinds.add(kind)
        source = SettingSource("code", kind.__name__)
        entries += _from_value(HANDLERS[kind], handler, source)
        if kind in (AORecipeKwargs, TERecipeKwargs):
            entries.append(
                SettingEntry(
                    ("fp8", "backend"),
                    "ao" if kind is AORecipeKwargs else "te",
                    source,
                    weak=True,
                )
            )
    return entries
