"""Laws that hold for every settings class and every single field, in loops over the schema."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

import pytest

from hasten.cli.flags import SettingsParser
from hasten.config import files, handoff
from hasten.config.base import Section, default_of, fit, given, meta_of
from hasten.config.checks import Problems
from hasten.config.decode import Mismatch, decode, encode
from hasten.config.established import from_established_environment
from hasten.config.resolve import (
    build_section,
    decode_all,
    from_code,
    from_environment,
    merge_entries,
    resolve,
)
from hasten.config.root import Config
from hasten.config.schema import BY_PATH, FIELDS, SETTABLE, FieldInfo, subsection
from hasten.config.source import PRECEDENCE, SettingEntry, SettingSource, SourceKind
from hasten.errors import ConfigError, UnknownSettingError


def sections(cls: type[Section] = Config) -> list[type[Section]]:
    """Return every settings class below one, itself included."""
    section_classes = [cls]
    for spec in cls.__dataclass_fields__.values():
        if inner := subsection(spec.type):
            section_classes += [
                section_class
                for section_class in sections(inner)
                if section_class not in section_classes
            ]
    return section_classes


def sample_values(tp: Any) -> list[Any]:
    """Return values of a type, enough to tell four sources apart where the type has as many."""
    origin = get_origin(tp)
    if origin is Literal:
        return list(get_args(tp))
    if origin in (Union, UnionType):
        return [
            value
            for member in get_args(tp)
            if member is not NoneType
            for value in sample_values(member)
        ]
    if origin is tuple:
        members = get_args(tp)
        if members[-1] is Ellipsis:
            inner = sample_values(members[0])
            return [tuple(inner[: n + 1]) for n in range(min(4, len(inner)))]
        return [(True, False, True), (False, False, True)]
    if origin is not None and issubclass(origin, Mapping):
        number = (get_args(tp) or (str, Any))[1] is not str
        return [{"a": n if number else str(n)} for n in range(1, 5)]
    if origin is not None and issubclass(origin, Callable):  # type: ignore[arg-type]
        return []  # only code can give one
    if tp is Any:
        return []
    samples_of_type: dict[Any, list[Any]] = {
        bool: [True, False],
        int: [1, 2, 3, 4],
        float: [1.5, 2.5, 3.5, 1e25],
        str: ["a", "b/c", "d e", "é"],
        timedelta: [timedelta(seconds=n) for n in (1, 90, 3600, 0.5)],
    }
    return samples_of_type[tp]


def text_of(value: Any, info: FieldInfo) -> str:
    """Return a value as a flag or a variable spells it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return ("\n" if info.meta.lines else ",").join(
            text_of(item, info) for item in value
        )
    if isinstance(value, dict):
        return json.dumps(value)
    return str(encode(value))


def entry_from(kind: SourceKind, info: FieldInfo, value: Any) -> SettingEntry:
    """Return the entry that a source makes when the user sets a field there, through the real readers."""
    match kind:
        case "file":
            tree: Any = encode(value)
            for name in reversed(info.path):
                tree = {name: tree}
            return files.read_text(json.dumps(tree), Path("c.json")).entries[0]
        case "environment":
            return from_environment({info.variable: text_of(value, info)})[0]
        case "flag":
            (entry,) = PARSER.parse_args(
                [f"--{info.flag}={text_of(value, info)}"]
            ).settings
            assert isinstance(entry, SettingEntry)
            return entry
        case _:
            (entry,) = from_code({info.name: value})
            return entry


PARSER = SettingsParser(prog="test")
PARSER.add_settings()
WITH_SAMPLES = [info for info in SETTABLE if sample_values(info.type)]


def test_every_settable_field_is_covered() -> None:
    assert list(SETTABLE) == WITH_SAMPLES


@pytest.mark.parametrize("cls", sections(), ids=lambda cls: cls.__name__)
def test_a_misspelt_name_in_code_is_told_with_the_nearest(cls: type[Section]) -> None:
    name = max(cls.__dataclass_fields__, key=len)
    wrong: dict[str, Any] = {name + "x": None}
    with pytest.raises(
        UnknownSettingError,
        match=f"{cls.__name__} has no setting '{name}x'; did you mean {name}",
    ):
        cls(**wrong)
    unnamed: tuple[Any, ...] = ("there",)
    with pytest.raises(ConfigError, match=f"{cls.__name__} got 'there' without a name"):
        cls(*unnamed)


@pytest.mark.parametrize("cls", sections(), ids=lambda cls: cls.__name__)
def test_class_law(cls: type[Section]) -> None:
    section = cls()
    assert dataclasses.is_dataclass(section)
    assert not hasattr(section, "__dict__"), "slotted"
    assert all(spec.kw_only for spec in cls.__dataclass_fields__.values())
    assert given(section) == frozenset()
    assert (
        section
        == pickle.loads(pickle.dumps(section))
        == copy.deepcopy(section)
        == dataclasses.replace(section)
    )
    for name in cls.__dataclass_fields__:
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(section, name, None)
        meta = meta_of(cls, name)
        assert meta.help, f"{cls.__name__}.{name} has no help"
        assert not meta.help.endswith("."), f"{cls.__name__}.{name}: help is a phrase"


@pytest.mark.parametrize("cls", sections(), ids=lambda cls: cls.__name__)
def test_class_round_trip(cls: type[Section]) -> None:
    """What is written is read back as it was, for every field at once and through YAML and JSON."""
    names = [
        n
        for n, s in cls.__dataclass_fields__.items()
        if not subsection(s.type) and sample_values(s.type)
    ]
    path = next((info.path[:-1] for info in FIELDS if info.owner is cls), ())
    for pick in (0, -1):
        values = {
            (*path, n): sample_values(cls.__dataclass_fields__[n].type)[pick]
            for n in names
            if not meta_of(cls, n).code_only
        }
        config = build_section(Config, (), values)
        assert isinstance(config, Config)
        for as_json in (False, True):
            file = files.read_text(files.dump(config, as_json=as_json), Path("c"))
            assert not file.notes
            problems = Problems()
            entries, _ = decode_all(file.entries, problems)
            problems.settle()
            assert (
                build_section(
                    Config, (), {entry.path: entry.value for entry in entries}
                )
                == config
            )


def for_every(fields: Iterable[FieldInfo], law: Callable[[FieldInfo], None]) -> None:
    """Hold many fields to one law, and name those that break it."""
    broken = []
    for info in fields:
        try:
            law(info)
        except (AssertionError, ConfigError, Mismatch) as error:
            broken.append(f"{info.name}: {type(error).__name__} {error}")
    assert not broken, "\n".join(broken)


def test_field_law() -> None:
    for_every(FIELDS, field_law)


def test_precedence() -> None:
    for_every(WITH_SAMPLES, precedence)


def test_flag_in_both_spellings() -> None:
    for_every(WITH_SAMPLES, flag_in_both_spellings)


def field_law(info: FieldInfo) -> None:
    """The default and every sample are values of the type, and survive a file, a flag and a variable."""
    default = default_of(info.owner, info.path[-1])
    assert decode(default, info.type) == default, "the default is a value of its type"
    assert encode(decode(encode(default), info.type)) == encode(default)
    for value in sample_values(info.type):
        assert decode(value, info.type) == value
        assert decode(encode(value), info.type) == value, "a file holds it"
        if not info.meta.code_only:
            text = text_of(value, info)
            assert (
                fit(info.owner, info.path[-1], text, info.name, text=True) == value
            ), "a flag and a variable hold it"


def precedence(info: FieldInfo) -> None:
    """For every field and every pair of sources the stronger one wins, whichever comes first."""
    values = sample_values(info.type)
    kinds = PRECEDENCE[1:]
    for strong in range(1, len(kinds)):
        for weak in range(strong):
            low = entry_from(kinds[weak], info, values[0])
            high = entry_from(
                kinds[strong], info, values[1] if len(values) > 1 else values[0]
            )
            for order in ([low, high], [high, low]):
                problems = Problems()
                decoded, notes = decode_all(order, problems)
                winners, shadowed = merge_entries(decoded, problems)
                problems.settle()
                assert not notes
                assert winners[info.path].value == (
                    values[1] if len(values) > 1 else values[0]
                )
                assert winners[info.path].source == high.source
                assert [entry.source for entry in shadowed[info.path]] == [low.source]


def flag_in_both_spellings(info: FieldInfo) -> None:
    """Every name of a flag works with underscores and with dashes, with a space and with =."""
    value = text_of(sample_values(info.type)[0], info)
    for flag in info.flags:
        for spelled in (flag, flag.replace("_", "-")):
            for argv in ([f"--{spelled}={value}"], [f"--{spelled}", value]):
                (entry,) = PARSER.parse_args(argv).settings
                assert (entry.path, entry.value, entry.source) == (
                    info.path,
                    value,
                    SettingSource("flag", f"--{spelled}"),
                )


def test_names_are_unique() -> None:
    flags = [flag for info in FIELDS for flag in info.flags]
    assert len(flags) == len(set(flags))
    variables = [info.variable for info in SETTABLE]
    assert len(variables) == len(set(variables))
    assert not {"HASTEN_CONFIG", "HASTEN_HOME", "HASTEN_LOG_LEVEL"} & set(variables), (
        "taken by the runtime"
    )


def test_handoff_keeps_every_value_and_source() -> None:
    """Everything that can be handed over arrives as it left, with the source it had."""
    for info in WITH_SAMPLES:
        for kind in PRECEDENCE[1:]:
            sent = SettingEntry(
                info.path,
                sample_values(info.type)[-1],
                SettingSource(kind, "somewhere:1"),
            )
            packed = handoff.pack_settings({info.path: sent})
            problems = Problems()
            (arrived,), _ = decode_all(handoff.unpack_settings(packed), problems)
            problems.settle()
            assert (arrived.path, arrived.value, arrived.source) == (
                sent.path,
                sent.value,
                sent.source,
            )


def test_resolved_build_equals_the_classes() -> None:
    assert resolve().config == Config()
    assert set(BY_PATH) == {info.path for info in FIELDS}
    assert from_established_environment({}) == []
