"""Base of typed settings: the section class, its decorator, and the description of one field."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import MISSING, Field, FrozenInstanceError, dataclass, field
from datetime import timedelta
from difflib import get_close_matches
from types import NoneType
from typing import (
    Any,
    ClassVar,
    Final,
    Literal,
    Self,
    TypeVar,
    cast,
    dataclass_transform,
    get_args,
    get_origin,
)

from hasten.config.decode import Mismatch, decode, describe_type, is_nothing
from hasten.errors import (
    ConfigError,
    ExtensionError,
    HastenWarning,
    SettingValueError,
    UnknownSettingError,
)
from hasten.extension import offers

_META: Final = "hasten"
_LARGEST: Final = 2**63 - 1


S = TypeVar("S", bound="Section")


class _Signature:
    """Signature of a section's constructor, computed when something asks for it."""

    def __get__(self, section: Section | None, cls: type[Section]) -> inspect.Signature:
        parameters = []
        for field_name, field_spec in cls.__dataclass_fields__.items():
            default = default_of(cls, field_name)
            if default is MISSING:
                default = inspect.Parameter.empty
            parameters.append(
                inspect.Parameter(
                    field_name,
                    inspect.Parameter.KEYWORD_ONLY,
                    default=default,
                    annotation=field_spec.type,
                )
            )
        return inspect.Signature(parameters)


@dataclass(frozen=True, slots=True, kw_only=True)
class SectionNames:
    """Names of a section outside of settings files: in code, in flags, and in files of Accelerate."""

    argument: str = ""
    """Argument of the Accelerator that takes the section; empty if code cannot set it."""
    is_handler: bool = False
    """True if code passes the section in `kwargs_handlers`."""
    strategy: str = ""
    """Strategy that giving the section chooses."""
    word_fields: tuple[str, ...] = ()
    """Fields that receive the value of a section given as a single word."""
    flag_prefix: str | None = None
    """Prefix of the fields' flags; by default the name of the section."""
    flag_group: str = ""
    """Title of the flags in the help."""
    mesh_settings: tuple[str, ...] = ()
    """Degrees in `parallelism` that the section's strategy supports; of an engine only, as torch's strategies support all."""
    rules: str = ""
    """Contradictions with other settings, as "module:object", a tuple of `checks.Rule`."""


@dataclass(frozen=True, slots=True)
class Absent:
    """A setting, or a whole section, that would have no effect."""

    name: str
    """Dotted name, such as parallelism.pp_size; a section includes everything below it."""
    what: str
    """The feature, as the subject of `… is not in this version`."""
    instead: str
    values: tuple[Any, ...] = ()  # Any: values of the setting
    """Refused values; by default all but the setting's default."""
    but: tuple[str, ...] = ()
    """Settings of the section that do have an effect."""


class Section:
    """Base class of settings: frozen, keyword-only, slotted, and aware of the fields that were passed explicitly.

    Its methods serve all sections. Those that `dataclass` would compile for each of them take half of the package's import.
    """

    __slots__ = ("_given",)
    section_names: ClassVar[SectionNames] = SectionNames()
    absent: ClassVar[tuple[Absent, ...]] = ()
    """Settings below this section that would have no effect, by their names in it."""
    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]
    __signature__: ClassVar[Any] = _Signature()
    _given: frozenset[str]

    def __init__(self, *unnamed: Any, **values: Any) -> None:
        cls = type(self)
        fields = self.__dataclass_fields__
        if unnamed or not values.keys() <= fields.keys():
            raise _wrong_names(cls, unnamed, values)
        given_names = set[str]()
        for field_name, field_spec in fields.items():
            field_value = values.get(field_name)
            # None means "not given" unless the field accepts None, as in scripts written for other libraries.
            if field_name in values and not (
                field_value is None and _refuses_none(cls, field_name)
            ):
                field_value = fit(cls, field_name, field_value)
                given_names.add(field_name)
            elif field_spec.default is not MISSING:
                field_value = field_spec.default
            elif field_spec.default_factory is not MISSING:
                field_value = field_spec.default_factory()
            else:
                raise ConfigError(
                    f"{cls.__name__} has no default for {field_name}, so it must be given; add {field_name}=...."
                )
            object.__setattr__(self, field_name, field_value)
        object.__setattr__(self, "_given", frozenset(given_names))

    def replace(self, **values: Any) -> Self:
        """Return a copy with other values of these fields, which counts them and the fields given before as given."""
        return type(self)(
            **{field_name: getattr(self, field_name) for field_name in given(self)}
            | values
        )

    def mesh_degrees(self) -> Mapping[str, int]:
        """Return the sizes of mesh axes that an engine's settings determine; the others are those of `parallelism`."""
        return {}

    def writes_run(self) -> bool:
        """Return whether this process may write the run's log and trackers; of several copies of a run, one does."""
        return True

    def sections(self) -> Iterator[Section]:
        """Yield the sections of these settings."""
        for field_name in self.__dataclass_fields__:
            field_value = getattr(self, field_name)
            if isinstance(field_value, Section):
                yield field_value

    def section(self, cls: type[S]) -> S:
        """Return the settings of this class among those below this section. Raises: LookupError if there are none."""
        for field_name in self.__dataclass_fields__:
            field_value = getattr(self, field_name)
            if isinstance(field_value, cls):
                return field_value
            if isinstance(field_value, Section):
                with suppress(LookupError):
                    return field_value.section(cls)
        raise LookupError(f"no settings of {cls.__name__}")

    def __setattr__(self, field_name: str, field_value: object) -> None:
        raise FrozenInstanceError(f"cannot assign to field {field_name!r}")

    def __delattr__(self, field_name: str) -> None:
        raise FrozenInstanceError(f"cannot delete field {field_name!r}")

    def __getstate__(self) -> list[Any]:
        return [getattr(self, field_name) for field_name in self.__dataclass_fields__]

    def __setstate__(self, state: list[Any]) -> None:
        for field_name, field_value in zip(
            self.__dataclass_fields__, state, strict=True
        ):
            object.__setattr__(self, field_name, field_value)

    def __eq__(self, section: object) -> bool:
        if type(section) is not type(self):
            return NotImplemented
        return all(
            getattr(self, field_name) == getattr(section, field_name)
            for field_name in self.__dataclass_fields__
        )

    def __hash__(self) -> int:
        return hash(
            tuple(getattr(self, field_name) for field_name in self.__dataclass_fields__)
        )

    def __repr__(self) -> str:
        shown = (
            f"{field_name}={getattr(self, field_name)!r}"
            for field_name in self.__dataclass_fields__
        )
        return f"{type(self).__qualname__}({', '.join(shown)})"


@dataclass(frozen=True, kw_only=True, slots=True)
class Meta:
    """Metadata of one field besides its type and default."""

    help: str
    # holds Python objects: not settable in a file, flag or variable
    code_only: bool = False
    minimum: float | None = None
    maximum: float | None = None
    # values below the minimum with a special meaning, such as -1
    also: tuple[int, ...] = ()
    # name of the flag, if it is not the section's prefix plus the field's name
    flag: str = ""
    flags: tuple[str, ...] = ()  # further names of the flag, those of Accelerate
    short: str = ""  # one letter
    prefix: str | None = None  # of a section: prefix of its fields' flags
    path: bool = False  # names a file or folder
    # a list whose items may contain commas: text has one item per line
    lines: bool = False


def setting(
    default: Any = MISSING,
    help: str = "",
    *,
    factory: Callable[[], Any] | None = None,
    **meta: Any,
) -> Any:
    """Return a dataclass field with its help text and metadata."""
    info = {_META: Meta(help=help, **meta)}
    if factory is None:
        return field(default=default, metadata=info)
    if isinstance(factory, type) and issubclass(factory, Section):
        # sections are immutable, so that all settings share one
        return field(default=factory(), metadata=info)
    return field(default_factory=factory, metadata=info)


def with_extensions(prefix: str) -> Callable[[type[S]], type[S]]:
    """Return a decorator, applied before `settings`, that adds the sections offered by extensions under names with this prefix."""

    def add_sections(cls: type[S]) -> type[S]:
        for path, offer in offers("settings").items():
            field_name = path.removeprefix(prefix)
            if not path.startswith(prefix) or "." in field_name:
                continue
            try:
                section = offer.load()
            except (
                ExtensionError
                # a package that cannot be imported must not stop a run that does not use it
            ) as error:
                warnings.warn(str(error), HastenWarning, stacklevel=2)
                continue
            if field_name in cls.__annotations__:
                raise ConfigError(
                    f"the extension {offer.extension!r} adds the setting {path!r}, which exists. Rename it."
                )
            names = section.section_names
            cls.__annotations__[field_name] = section
            setattr(
                cls,
                field_name,
                setting(
                    factory=section, help=names.flag_group, prefix=names.flag_prefix
                ),
            )
        return cls

    return add_sections


@dataclass_transform(kw_only_default=True, frozen_default=True)
def settings(cls: type[S]) -> type[S]:
    """Make `cls` a frozen, keyword-only, slotted dataclass whose instances record the explicitly passed fields."""
    return cast(
        type[S],
        dataclass(init=False, repr=False, eq=False, kw_only=True, slots=True)(cls),
    )


def _wrong_names(
    cls: type[Section], unnamed: tuple[Any, ...], values: Mapping[str, Any]
) -> ConfigError:
    """Return the error for values without the name of a setting; it names the class and the nearest setting."""
    setting_names = list(cls.__dataclass_fields__)
    if unnamed:
        return ConfigError(
            f"{cls.__name__} got {', '.join(map(repr, unnamed))} without a name, so it is unclear which setting is meant; "
            f"write for example {cls.__name__}({setting_names[0]}={unnamed[0]!r})."
        )
    unknown = next(
        field_name for field_name in values if field_name not in setting_names
    )
    similar_names = get_close_matches(unknown, setting_names, n=1, cutoff=0.5)
    if similar_names:
        hint = f"did you mean {similar_names[0]}?"
    else:
        hint = f"it has {', '.join(setting_names)}."
    return UnknownSettingError(f"{cls.__name__} has no setting {unknown!r}; {hint}")


def _refuses_none(cls: type[Section], field_name: str) -> bool:
    field_spec = cls.__dataclass_fields__.get(field_name)
    return (
        field_spec is not None
        and field_spec.type is not Any
        and NoneType not in get_args(field_spec.type)
    )


def given(section: Section) -> frozenset[str]:
    """Return the names of the fields that were passed when `section` was created.

    This information is lost by pickling and copying; then the fields that differ from their default are returned.
    `dataclasses.replace` passes every field; use the section's method.
    """
    try:
        return section._given
    except AttributeError:
        return frozenset(
            field_name
            for field_name in section.__dataclass_fields__
            if getattr(section, field_name) != default_of(type(section), field_name)
        )


def default_of(cls: type[Section], field_name: str) -> Any:
    """Return the default value of a field."""
    field_spec = cls.__dataclass_fields__[field_name]
    if field_spec.default_factory is not MISSING:
        return field_spec.default_factory()
    return field_spec.default


def meta_of(cls: type[Section], field_name: str) -> Meta:
    """Return the metadata of a field."""
    return cast(Meta, cls.__dataclass_fields__[field_name].metadata[_META])


def fit(
    cls: type[Section],
    field_name: str,
    field_value: Any,
    source: object = None,
    *,
    text: bool = False,
) -> Any:
    """Return `value` converted to the field's type, after checking its range.

    Raises: SettingValueError that starts with `source`, by default the call in code, and names the expected type.
    """
    field_spec = cls.__dataclass_fields__[field_name]
    meta: Meta = field_spec.metadata[_META]
    # those have values that are refused
    exact = type(field_value) is field_spec.type and field_spec.type not in (
        float,
        timedelta,
    )
    try:
        if exact:
            fitted_value = field_value
        else:
            fitted_value = _converted(field_value, field_spec.type, meta, text)
        _check_limits(field_value, fitted_value, meta)
    except Mismatch as error:
        source_text = source or f"{cls.__name__}({field_name}={field_value!r})"
        raise SettingValueError(f"{source_text}: {error}") from error
    return fitted_value


# Any: the value given, and the value of the field's type
def _check_limits(field_value: Any, fitted_value: Any, meta: Meta) -> None:
    """Raise Mismatch for a path that is none, and for a number out of range."""
    if meta.path:
        if isinstance(fitted_value, str) and "\0" in fitted_value:
            raise Mismatch(
                "text that contains a NUL character, and no file system accepts one; give a path as text, such as 'runs/first'."
            )
        if isinstance(field_value, int):
            raise Mismatch(
                f"{kind_of(field_value)} that is no path; give a path as text, such as 'runs/first'."
            )
    if not isinstance(fitted_value, int | float) or isinstance(fitted_value, bool):
        return
    problem = ""
    if isinstance(fitted_value, int) and abs(fitted_value) > _LARGEST:
        problem = "give a number of at most 64 bits"
    elif meta.maximum is not None and fitted_value > meta.maximum:
        problem = f"give at most {meta.maximum:.15g}"
    elif meta.minimum is not None and fitted_value < meta.minimum:
        also = "".join(f", or {special}" for special in meta.also)
        if fitted_value not in meta.also:
            problem = f"give at least {meta.minimum:g}{also}"
    if problem:
        raise Mismatch(f"out of range ({meta.help}); {problem}.")


# Any: the value given, the field's type, and the value of that type
def _converted(field_value: Any, tp: Any, meta: Meta, text: bool) -> Any:
    is_listed = (
        meta.lines and isinstance(field_value, str) and not is_nothing(field_value)
    )
    if is_listed:
        lines = [line for line in field_value.splitlines() if line.strip()]
    else:
        lines = field_value
    try:
        return decode(lines, tp, text=text)
    except Mismatch as error:
        is_choice = isinstance(field_value, str) and choices_of(tp)
        got = "" if is_choice else f"got {kind_of(field_value)}, "
        raise Mismatch(
            f"{got}expected {describe_type(tp)}{type_advice(field_value, tp)}."
        ) from error


def kind_of(field_value: Any) -> str:
    """Return a description of a value's type, for messages."""
    if field_value is None:
        return "empty"
    if isinstance(field_value, float) and not math.isfinite(field_value):
        return str(field_value)
    names = {
        bool: "a boolean",
        int: "a whole number",
        float: "a number",
        str: "text",
        dict: "a mapping",
        list: "a list",
    }
    return names.get(type(field_value), f"of type {type(field_value).__name__}")


def type_advice(field_value: Any, tp: Any) -> str:
    """Return advice about a value of the wrong type, beyond the expected type; empty if there is none."""
    if isinstance(field_value, str):
        try:
            decode(field_value, tp, text=True)
            return "; remove the quotes"
        except Mismatch:
            similar_choices = get_close_matches(
                field_value.lower(), choices_of(tp), n=1, cutoff=0.5
            )
            if similar_choices:
                return f"; the nearest is {similar_choices[0]!r}"
    return ""


def choices_of(tp: Any) -> list[str]:
    """Return the words of the closed sets in a type."""
    return [
        str(choice)
        for member in (tp, *get_args(tp))
        if get_origin(member) is Literal
        for choice in get_args(member)
    ]
