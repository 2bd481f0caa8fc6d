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


def decode(raw_value: Any, value_type: Any, *, text: bool = False) -> Any:
    """Return `value` as an instance of the type `tp`.

    Raises: Mismatch if it does not fit; text is read as a number or a list only if `text` is true.
    """
    origin = get_origin(value_type)
    if value_type is Any:
        return raw_value
    if origin in (Union, UnionType):
        return _decode_union(raw_value, get_args(value_type), text)
    if origin is Literal:
        return _decode_literal(raw_value, get_args(value_type), text)
    if origin is tuple:
        return _decode_tuple(raw_value, get_args(value_type), text)
    if origin is not None and issubclass(origin, Mapping):
        return _decode_mapping(raw_value, get_args(value_type)[1], text)
    if origin is not None and issubclass(origin, Callable):  # type: ignore[arg-type]
        return _check_fits(raw_value, callable(raw_value))
    return _decode_scalar(raw_value, value_type, text)


def is_nothing(text: str) -> bool:
    """Return whether the text means "no value"."""
    return text.strip().lower() in _NOTHING


def _check_fits(raw_value: T, fits: bool) -> T:
    if not fits:
        raise Mismatch
    return raw_value


def _decode_scalar(raw_value: Any, value_type: type, text: bool) -> Any:
    if value_type is bool:
        return to_bool(raw_value)
    if value_type is int:
        return _decode_integer(raw_value, text)
    if value_type is float:
        return _decode_number(raw_value)
    if value_type is str:
        if isinstance(raw_value, PathLike):
            raw_value = fspath(raw_value)
        return _check_fits(
            str(raw_value) if type(raw_value) is int else raw_value,
            type(raw_value) is int or isinstance(raw_value, str),
        )
    if value_type is NoneType:
        return _decode_nothing(raw_value, text)
    if value_type is timedelta:
        return _decode_duration(raw_value)
    return _check_fits(raw_value, isinstance(raw_value, value_type))


def to_bool(raw_value: Any) -> bool:
    """Return a boolean, given as one or as a word such as "False" or "yes"; numbers are not booleans."""
    if isinstance(raw_value, bool):
        return raw_value
    if isinstance(raw_value, str) and (word := raw_value.strip().lower()) in _WORDS:
        return _WORDS[word]
    raise Mismatch


def _decode_integer(raw_value: Any, text: bool) -> int:
    if isinstance(raw_value, int) and not isinstance(raw_value, bool):
        return int(raw_value)
    if text and isinstance(raw_value, str) and _INTEGER.fullmatch(raw_value.strip()):
        return int(raw_value.replace("_", ""))
    raise Mismatch


def _decode_number(raw_value: Any) -> float:
    if isinstance(raw_value, int | float) and not isinstance(raw_value, bool):
        return _check_fits(float(raw_value), math.isfinite(raw_value))
    if isinstance(raw_value, str):  # 1e-5 is text in YAML 1.1
        try:
            return _check_fits(float(raw_value), math.isfinite(float(raw_value)))
        except ValueError as error:
            raise Mismatch from error
    raise Mismatch


def _decode_nothing(raw_value: Any, text: bool) -> None:
    if raw_value is not None and not (
        text and isinstance(raw_value, str) and is_nothing(raw_value)
    ):
        raise Mismatch


def _decode_duration(raw_value: Any) -> timedelta:
    if isinstance(raw_value, timedelta):
        return _check_fits(raw_value, raw_value > timedelta(0))
    if (
        isinstance(raw_value, int | float)
        and not isinstance(raw_value, bool)
        and 0 < raw_value < _LONGEST_S
    ):
        return timedelta(seconds=raw_value)
    if (
        isinstance(raw_value, str)
        and (match := _DURATION.fullmatch(raw_value.strip()))
        and any(match.groups())
    ):
        hours, minutes, seconds = (float(group or 0) for group in match.groups())
        total = hours * 3600 + minutes * 60 + seconds
        return timedelta(seconds=_check_fits(total, 0 < total < _LONGEST_S))
    raise Mismatch


def _decode_union(raw_value: Any, member_types: tuple[Any, ...], text: bool) -> Any:
    # Closed sets first, text last: "auto" before any string, "3" as a number before the text "3".
    for member_type in sorted(member_types, key=_union_order):
        if member_type is Any and isinstance(raw_value, _PLAIN):
            # "or any object" accepts objects of other libraries, not a mistyped word
            continue
        try:
            return decode(raw_value, member_type, text=text)
        except Mismatch:
            continue
    raise Mismatch


def _union_order(value_type: Any) -> int:
    if value_type is NoneType:
        return 0
    if get_origin(value_type) is Literal:
        return 1
    if get_origin(value_type) is tuple:
        return 7
    return _ORDER.get(value_type, 5)


def _decode_literal(raw_value: Any, choices: tuple[Any, ...], text: bool) -> Any:
    for choice in choices:
        if type(raw_value) is type(choice) and raw_value == choice:
            return choice
    if isinstance(raw_value, str):  # string enums of other libraries fit too
        word = str.__str__(raw_value).strip().lower()
        for choice in choices:
            if isinstance(choice, str) and choice.lower() == word:
                return choice
            if text and not isinstance(choice, str) and str(choice) == word:
                return choice
    raise Mismatch


def _decode_tuple(
    raw_value: Any, member_types: tuple[Any, ...], text: bool
) -> tuple[Any, ...]:
    if isinstance(raw_value, str):
        texts: Sequence[Any] = [
            text_part.strip()
            for text_part in raw_value.strip("[]() ").split(",")
            if text_part.strip()
        ]
        text = True  # items of a comma-separated list are always text
    elif isinstance(raw_value, list | tuple | set | frozenset):
        texts = list(raw_value)
    elif isinstance(raw_value, int) and not isinstance(raw_value, bool):
        texts = [raw_value]  # gpu_ids: 0
    else:
        raise Mismatch
    if member_types[-1] is not Ellipsis:
        _check_fits(texts, len(texts) == len(member_types))
        return tuple(
            decode(text_part, member_type, text=text)
            for text_part, member_type in zip(texts, member_types, strict=True)
        )
    return tuple(decode(text_part, member_types[0], text=text) for text_part in texts)


def _decode_mapping(raw_value: Any, member_type: Any, text: bool) -> dict[str, Any]:
    if text and isinstance(raw_value, str):
        raw_value = _mapping_from_text(raw_value)
    if not isinstance(raw_value, Mapping) or not all(
        isinstance(key, str) for key in raw_value
    ):
        raise Mismatch
    return {
        key: decode(raw_item, member_type, text=text)
        for key, raw_item in raw_value.items()
    }


def _mapping_from_text(raw_value: str) -> Any:
    """Return {"a": 1, "b": "x,y"} for '{"a": 1, "b": "x,y"}' and for 'a=1,b=x,y': a part without = continues the value."""
    if raw_value.lstrip().startswith("{"):
        try:
            return json.loads(raw_value)
        except json.JSONDecodeError as error:
            raise Mismatch from error
    texts: dict[str, str] = {}
    key = ""
    for pair in filter(str.strip, raw_value.split(",")):
        name, equals, raw_item = pair.partition("=")
        if equals:
            key = name.strip()
        if not key:
            raise Mismatch
        texts[key] = raw_item.strip() if equals else f"{texts[key]},{pair.strip()}"
    return {key: _plain_item(text) for key, text in texts.items()}


def _plain_item(raw_item: str) -> Any:
    """Return the number or boolean named by an item of key=value, else the text."""
    for value_type in (int, float):
        try:
            return decode(raw_item, value_type, text=True)
        except Mismatch:
            continue
    if raw_item.lower() in {"true", "false"}:
        return _WORDS[raw_item.lower()]
    return raw_item


def encode(raw_value: Any) -> Any:
    """Return a value in a form for JSON and YAML; the inverse of `decode`."""
    if isinstance(raw_value, timedelta):
        return raw_value.total_seconds()
    if isinstance(raw_value, tuple):
        return [encode(raw_item) for raw_item in raw_value]
    if isinstance(raw_value, Mapping):
        return {key: encode(raw_item) for key, raw_item in raw_value.items()}
    return raw_value


def describe_type(value_type: Any) -> str:
    """Return a description of the values that a type accepts, for messages."""
    origin = get_origin(value_type)
    if origin in (Union, UnionType):
        words = [
            describe_type(member_type)
            for member_type in get_args(value_type)
            if member_type not in (NoneType, Any)
        ]
        return " or ".join(dict.fromkeys(words)) or "anything"
    if origin is Literal:
        choices = [str(choice) for choice in get_args(value_type)]
        return f"one of {', '.join(choices)}" if len(choices) > 1 else choices[0]
    if origin is tuple:
        member_types = get_args(value_type)
        if member_types[-1] is Ellipsis:
            return f"a list (each: {describe_type(member_types[0])})"
        return f"a list of {len(member_types)} (each: {describe_type(member_types[0])})"
    if origin is not None and issubclass(origin, Mapping):
        return "a mapping"
    if origin is not None:
        return "a function"
    return _NAMES.get(value_type) or str(getattr(value_type, "__name__", value_type))
