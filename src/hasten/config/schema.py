"""The settings tree as a flat list of fields with their paths, types, flags and variables."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType, UnionType
from typing import Any, Final, Union, get_args, get_origin

from hasten.config.base import Meta, Section, default_of, meta_of
from hasten.config.root import Config
from hasten.config.source import Path, dotted

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
        return dotted(self.path)

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


def walk(
    cls: type[Section] = Config,
    path: Path = (),
    prefix: str = "",
    group: str = "general",
) -> Iterator[FieldInfo]:
    """Yield every leaf setting below a section, in order of declaration."""
    for name, spec in cls.__dataclass_fields__.items():
        meta = meta_of(cls, name)
        if inner := subsection(spec.type):
            inner_prefix = prefix + f"{name}_" if meta.prefix is None else meta.prefix
            yield from walk(
                inner, (*path, name), inner_prefix, meta.help if not path else group
            )
        else:
            flag = meta.flag or prefix + name
            default = default_of(cls, name)
            fixed = MappingProxyType(default) if isinstance(default, dict) else default
            yield FieldInfo((*path, name), cls, spec.type, fixed, meta, flag, group)


FIELDS: Final[tuple[FieldInfo, ...]] = tuple(walk())
BY_PATH: Final[Mapping[Path, FieldInfo]] = MappingProxyType(
    {info.path: info for info in FIELDS}
)
SETTABLE: Final[tuple[FieldInfo, ...]] = tuple(
    info for info in FIELDS if not info.meta.code_only
)
BY_VARIABLE: Final[Mapping[str, FieldInfo]] = MappingProxyType(
    {info.variable: info for info in SETTABLE}
)


def section_at(path: Path) -> type[Section] | None:
    """Return the section class at a path, or None for a leaf or an unknown path."""
    cls: type[Section] = Config
    for name in path:
        spec = cls.__dataclass_fields__.get(name)
        inner = subsection(spec.type) if spec else None
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
