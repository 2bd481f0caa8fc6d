"""The settings tree as a flat list of fields with their paths, types, flags and variables."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType, UnionType
from typing import Any, Final, Union, get_args, get_origin

from hasten.config.base import Meta, Section, default_of, meta_of
from hasten.config.root import Config
from hasten.config.source import Path, dotted_name

VARIABLE_PREFIX: Final = "HASTEN_"


@dataclass(frozen=True, slots=True)
class FieldInfo:
    """One setting of the schema."""

    path: Path
    owner: type[Section]
    type: Any
    default: Any
    meta: Meta
    flag: str
    group: str

    @property
    def name(self) -> str:
        """The dotted name."""
        return dotted_name(self.path)

    @property
    def flags(self) -> tuple[str, ...]:
        """Every name of the flag with underscores, the main one first."""
        return tuple(dict.fromkeys((self.flag, *self.meta.flags)))

    @property
    def variable(self) -> str:
        """The environment variable of hasten."""
        return VARIABLE_PREFIX + self.flag.upper()

    @property
    def is_bool(self) -> bool:
        """True if the flag may be given without a value and negated."""
        return self.type is bool or (
            get_origin(self.type) in (Union, UnionType) and bool in get_args(self.type)
        )


def subsection(tp: Any) -> type[Section] | None:
    """Return the section class of a field, or None for a plain field."""
    if isinstance(tp, type) and issubclass(tp, Section):
        return tp
    return None


def walk_fields(
    cls: type[Section] = Config,
    setting_path: Path = (),
    prefix: str = "",
    group: str = "general",
) -> Iterator[FieldInfo]:
    """Yield every leaf setting below a section, in order of declaration."""
    for field_name, field_spec in cls.__dataclass_fields__.items():
        field_meta = meta_of(cls, field_name)
        if inner := subsection(field_spec.type):
            if field_meta.prefix is None:
                inner_prefix = prefix + f"{field_name}_"
            else:
                inner_prefix = field_meta.prefix
            yield from walk_fields(
                inner,
                (*setting_path, field_name),
                inner_prefix,
                field_meta.help if not setting_path else group,
            )
        else:
            flag = field_meta.flag or prefix + field_name
            default = default_of(cls, field_name)
            fixed = MappingProxyType(default) if isinstance(default, dict) else default
            yield FieldInfo(
                (*setting_path, field_name),
                cls,
                field_spec.type,
                fixed,
                field_meta,
                flag,
                group,
            )


FIELDS: Final[tuple[FieldInfo, ...]] = tuple(walk_fields())
BY_PATH: Final[Mapping[Path, FieldInfo]] = MappingProxyType(
    {info.path: info for info in FIELDS}
)
SETTABLE: Final[tuple[FieldInfo, ...]] = tuple(
    info for info in FIELDS if not info.meta.code_only
)
BY_VARIABLE: Final[Mapping[str, FieldInfo]] = MappingProxyType(
    {info.variable: info for info in SETTABLE}
)


def section_at(setting_path: Path) -> type[Section] | None:
    """Return the section class at a path, or None for a leaf or an unknown path."""
    cls: type[Section] = Config
    for field_name in setting_path:
        field_spec = cls.__dataclass_fields__.get(field_name)
        inner = subsection(field_spec.type) if field_spec else None
        if inner is None:
            return None
        cls = inner
    return cls


SECTIONS: Final[Mapping[Path, type[Section]]] = MappingProxyType(
    {
        path: section
        for info in FIELDS
        for path in (info.path[:depth] for depth in range(1, len(info.path)))
        if (section := section_at(path)) is not None
    }
)
"""The section class of each path that is not a leaf."""
