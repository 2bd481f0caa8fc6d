"""Strict conversion of one value to a field's declared type, without guessing or truthiness."""

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from os import PathLike, fspath
from types import MappingProxyType, NoneType, UnionType
from typing import Any, Final, Literal, TypeVar, Union, get_args, get_origin

_WORDS: Final = MappingProxyType(
    dict.fromkeys(("true", "yes", "on", "1", "y", "t"), True)
    | dict.fromkeys(("false", "no", "off", "0", "n", "f"), False)
)
_NOTHING: Final = frozenset({"", "none", "null"})
_DURATION: Final = re.compile(
    r"(?:(\d+(?:\.\d+)?)h)?(?:(\d+(?:\.\d+)?)m)?(?:(\d+(?:\.\d+)?)s?)?", re.IGNORECASE
)
_NAMES: Final = MappingProxyType[Any, str](
    {
        bool: "true or false",
        int: "a whole number",
        float: "a number",
        str: "text",
        Any: "anything",
        timedelta: "a positive duration in seconds, or such as 30m",
    }
)
_LONGEST_S: Final = 10 * 365 * 24 * 3600
_PLAIN: Final = (str, int, float, list, tuple, dict, NoneType)
_ORDER: Final = MappingProxyType[Any, int]({int: 2, bool: 3, float: 4, str: 6, Any: 8})
_INTEGER: Final = re.compile(r"[+-]?[0-9][0-9_]{0,30}")

T = TypeVar("T")


class Mismatch(ValueError):
    """Raised for a value that does not fit its declared type; the caller adds the source of the value."""


def decode(value: Any, tp: Any, *, text: bool = False) -> Any:
    """Return `value` as an instance of the type `tp`.

    Raises: Mismatch if it does not fit; text is read as a number or a list only if `text` is true.
    """
    origin = get_origin(tp)
    if tp is Any:
        return value
    if origin in (Union, UnionType):
        return _union(value, get_args(tp), text)
    if origin is Literal:
        return _literal(value, get_args(tp), text)
    if origin is tuple:
        return _tuple(value, get_args(tp), text)
    if origin is not None and issubclass(origin, Mapping):
        return _mapping(value, get_args(tp)[1], text)
    if origin is not None and issubclass(origin, Callable):  # type: ignore[arg-type]
        return _check(value, callable(value))
    return _scalar(value, tp, text)


def is_nothing(text: str) -> bool:
    """Return whether the text means "no value"."""
    return text.strip().lower() in _NOTHING


def _check(value: T, fits: bool) -> T:
    if not fits:
        raise Mismatch
    return value


def _scalar(value: Any, tp: type, text: bool) -> Any:
    if tp is bool:
        return to_bool(value)
    if tp is int:
        return _integer(value, text)
    if tp is float:
        return _number(value)
    if tp is str:
        if isinstance(value, PathLike):
            value = fspath(value)
        return _check(
            str(value) if type(value) is int else value,
            type(value) is int or isinstance(value, str),
        )
    if tp is NoneType:
        return _nothing(value, text)
    if tp is timedelta:
        return _duration(value)
    return _check(value, isinstance(value, tp))


def to_bool(value: Any) -> bool:
    """Return a boolean, given as one or as a word such as "False" or "yes"; numbers are not booleans."""
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and (word := value.strip().lower()) in _WORDS:
        return _WORDS[word]
    raise Mismatch


def _integer(value: Any, text: bool) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return int(value)
    if text and isinstance(value, str) and _INTEGER.fullmatch(value.strip()):
        return int(value.replace("_", ""))
    raise Mismatch


def _number(value: Any) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return _check(float(value), math.isfinite(value))
    if isinstance(value, str):  # 1e-5 is text in YAML 1.1
        try:
            return _check(float(value), math.isfinite(float(value)))
        except ValueError as error:
            raise Mismatch from error
    raise Mismatch


def _nothing(value: Any, text: bool) -> None:
    if value is not None and not (
        text and isinstance(value, str) and is_nothing(value)
    ):
        raise Mismatch


def _duration(value: Any) -> timedelta:
    if isinstance(value, timedelta):
        return _check(value, value > timedelta(0))
    if (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and 0 < value < _LONGEST_S
    ):
        return timedelta(seconds=value)
    if (
        isinstance(value, str)
        and (match := _DURATION.fullmatch(value.strip()))
        and any(match.groups())
    ):
        hours, minutes, seconds = (float(group or 0) for group in match.groups())
        total = hours * 3600 + minutes * 60 + seconds
        return timedelta(seconds=_check(total, 0 < total < _LONGEST_S))
    raise Mismatch


def _union(value: Any, members: tuple[Any, ...], text: bool) -> Any:
    # Closed sets first, text last: "auto" before any string, "3" as a number before the text "3".
    for member in sorted(members, key=_eagerness):
        if member is Any and isinstance(value, _PLAIN):
            # "or any object" accepts objects of other libraries, not a mistyped word
            continue
        try:
            return decode(value, member, text=text)
        except Mismatch:
            continue
    raise Mismatch


def _eagerness(tp: Any) -> int:
    if tp is NoneType:
        return 0
    if get_origin(tp) is Literal:
        return 1
    if get_origin(tp) is tuple:
        return 7
    return _ORDER.get(tp, 5)


def _literal(value: Any, choices: tuple[Any, ...], text: bool) -> Any:
    for choice in choices:
        if type(value) is type(choice) and value == choice:
            return choice
    if isinstance(value, str):  # string enums of other libraries fit too
        word = str.__str__(value).strip().lower()
        for choice in choices:
            if isinstance(choice, str) and choice.lower() == word:
                return choice
            if text and not isinstance(choice, str) and str(choice) == word:
                return choice
    raise Mismatch


def _tuple(value: Any, members: tuple[Any, ...], text: bool) -> tuple[Any, ...]:
    if isinstance(value, str):
        texts: Sequence[Any] = [
            text_part.strip()
            for text_part in value.strip("[]() ").split(",")
            if text_part.strip()
        ]
        text = True  # items of a comma-separated list are always text
    elif isinstance(value, list | tuple | set | frozenset):
        texts = list(value)
    elif isinstance(value, int) and not isinstance(value, bool):
        texts = [value]  # gpu_ids: 0
    else:
        raise Mismatch
    if members[-1] is not Ellipsis:
        _check(texts, len(texts) == len(members))
        return tuple(
            decode(text_part, member, text=text)
            for text_part, member in zip(texts, members, strict=True)
        )
    return tuple(decode(text_part, members[0], text=text) for text_part in texts)


def _mapping(value: Any, member: Any, text: bool) -> dict[str, Any]:
    if text and isinstance(value, str):
        value = _mapping_from_text(value)
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise Mismatch
    return {key: decode(item, member, text=text) for key, item in value.items()}


def _mapping_from_text(value: str) -> Any:
    """Return {"a": 1, "b": "x,y"} for '{"a": 1, "b": "x,y"}' and for 'a=1,b=x,y': a part without = continues the value."""
    if value.lstrip().startswith("{"):
        try:
            return json.loads(value)
        except json.JSONDecodeError as error:
            raise Mismatch from error
    texts: dict[str, str] = {}
    key = ""
    for pair in filter(str.strip, value.split(",")):
        name, equals, item = pair.partition("=")
        if equals:
            key = name.strip()
        if not key:
            raise Mismatch
        texts[key] = item.strip() if equals else f"{texts[key]},{pair.strip()}"
    return {key: _plain(text) for key, text in texts.items()}


def _plain(item: str) -> Any:
    """Return the number or boolean named by an item of key=value, else the text."""
    for tp in (int, float):
        try:
            return decode(item, tp, text=True)
        except Mismatch:
            continue
    return _WORDS[item.lower()] if item.lower() in {"true", "false"} else item


def encode(value: Any) -> Any:
    """Return a value in a form for JSON and YAML; the inverse of `decode`."""
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, tuple):
        return [encode(item) for item in value]
    if isinstance(value, Mapping):
        return {key: encode(item) for key, item in value.items()}
    return value


def describe(tp: Any) -> str:
    """Return a description of the values that a type accepts, for messages."""
    origin = get_origin(tp)
    if origin in (Union, UnionType):
        words = [
            describe(member) for member in get_args(tp) if member not in (NoneType, Any)
        ]
        return " or ".join(dict.fromkeys(words)) or "anything"
    if origin is Literal:
        choices = [str(choice) for choice in get_args(tp)]
        return f"one of {', '.join(choices)}" if len(choices) > 1 else choices[0]
    if origin is tuple:
        members = get_args(tp)
        if members[-1] is Ellipsis:
            return f"a list (each: {describe(members[0])})"
        return f"a list of {len(members)} (each: {describe(members[0])})"
    if origin is not None and issubclass(origin, Mapping):
        return "a mapping"
    if origin is not None:
        return "a function"
    return _NAMES.get(tp) or str(getattr(tp, "__name__", tp))
