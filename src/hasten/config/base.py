"""The ground of typed settings: the section class, its decorator, and the description of one field."""

from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, field
from functools import wraps
from typing import Any, ClassVar, TypeVar, cast, dataclass_transform

_META = "hasten"


class Section:
    """Base of every settings class: frozen, keyword-only, slotted, and aware of which fields were given by name."""

    __slots__ = ("_given",)
    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]
    _given: frozenset[str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Meta:
    """What the schema knows about one field besides its type and default."""

    help: str
    code_only: bool = False  # holds Python objects: not settable in a file, flag or variable
    minimum: float | None = None
    also: tuple[int, ...] = ()  # values below the minimum that have a meaning of their own, such as -1
    flags: tuple[str, ...] = ()  # further flag names, without dashes, underscores spelled
    variables: tuple[str, ...] = ()  # established environment variables
    shown: bool = True  # listed by --help


S = TypeVar("S", bound=Section)


def setting(
    default: Any = MISSING,
    help: str = "",
    *,
    factory: Callable[[], Any] | None = None,
    **meta: Any,
) -> Any:
    """Return a dataclass field with its help text and where else it may come from."""
    info = {_META: Meta(help=help, **meta)}
    if factory is not None:
        return field(default_factory=factory, metadata=info)
    return field(default=default, metadata=info)


@dataclass_transform(kw_only_default=True, frozen_default=True)
def settings(cls: type[S]) -> type[S]:
    """Make `cls` a frozen, keyword-only, slotted dataclass whose instances remember what was given explicitly."""
    made = cast(type[S], dataclass(frozen=True, kw_only=True, slots=True)(cls))
    build: Callable[..., None] = made.__init__

    @wraps(build)
    def init(self: S, **values: Any) -> None:
        build(self, **values)
        object.__setattr__(self, "_given", frozenset(values))

    made.__init__ = init  # type: ignore[method-assign, assignment]
    return made


def given(section: Section) -> frozenset[str]:
    """Return the names of the fields that were passed when `section` was made.

    After pickling or copying this is no longer known; the fields that differ from their default stand in for it.
    """
    try:
        return section._given
    except AttributeError:
        return frozenset(
            name for name in section.__dataclass_fields__ if getattr(section, name) != default_of(type(section), name)
        )


def default_of(cls: type[Section], name: str) -> Any:
    """Return the default value of a field."""
    spec = cls.__dataclass_fields__[name]
    return spec.default_factory() if spec.default_factory is not MISSING else spec.default


def meta_of(cls: type[Section], name: str) -> Meta:
    """Return the schema's description of a field."""
    return cast(Meta, cls.__dataclass_fields__[name].metadata[_META])


def field_types(cls: type[Section]) -> Mapping[str, Any]:
    """Return the declared type of every field; config modules do not postpone annotations, so these are real types."""
    return {name: spec.type for name, spec in cls.__dataclass_fields__.items()}
