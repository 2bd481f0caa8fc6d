"""Conversion of nested state into JSON plus named tensors and back, without pickle."""

from __future__ import annotations

import base64
import collections
import datetime as dt
import math
from collections.abc import Callable, Mapping
from itertools import repeat
from pathlib import Path, PurePath
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from hasten.checkpoint.base import Json, Slice
from hasten.errors import CheckpointError, CorruptCheckpointError

TAG = "$"  # a JSON object with this key represents a value that JSON does not have


# Any: the user's state
def pack(value: Any, path: str = "") -> tuple[Json, dict[str, Tensor | Slice]]:
    """Return JSON that describes the value, and the tensors in it by name.

    Raises: CheckpointError naming the path of a value that cannot be stored without pickle.
    """
    tensors: dict[str, Tensor | Slice] = {}
    return _pack(value, path, tensors, keep_tags=False), tensors


def _pack(
    value: Any, path: str, tensors: dict[str, Tensor | Slice], keep_tags: bool
) -> Json:
    """Return JSON for a value and add its tensors; `keep_tags` leaves dicts that are tagged already unchanged."""
    kind = type(value)
    if value is None or kind is int or isinstance(value, bool):
        return value  # type: ignore[no-any-return]  # one of three JSON types
    if isinstance(value, str):
        return str(value)
    if kind is float:
        return _number(value)
    if isinstance(value, (Tensor, Slice)):
        return {TAG: "tensor", "key": _add(value, path, tensors)}
    inner = f"{path}/" if path else ""
    if kind in (list, tuple):
        items: list[Json] = []
        for index, item in enumerate(value):
            items.append(_pack(item, f"{inner}{index}", tensors, keep_tags))
        return items if kind is list else {TAG: "tuple", "of": items}
    if (
        kind is dict
        and {*map(type, value)} <= {str}
        and (keep_tags or TAG not in value)
    ):
        made: dict[str, Json] = {}
        for key, item in value.items():
            made[key] = _pack(item, inner + key, tensors, keep_tags)
        return made
    return _pack_tagged(value, path, tensors, keep_tags)


def _pack_tagged(
    value: Any, path: str, tensors: dict[str, Tensor | Slice], keep_tags: bool
) -> Json:
    """Return tagged JSON for a value of a type that JSON does not have."""
    kind, inner = type(value), f"{path}/" if path else ""
    if kind is MappingProxyType:
        return _pack(dict(value), path, tensors, keep_tags)
    if kind in _MAPPINGS:
        pairs: list[Json] = [
            [
                _pack(key, f"{path}/key", tensors, keep_tags),
                _pack(item, f"{inner}{key}", tensors, keep_tags),
            ]
            for key, item in value.items()
        ]
        return {TAG: _MAPPINGS[kind], "of": pairs}
    if kind in (torch.Size, set, frozenset, collections.deque):
        values = sorted(value, key=repr) if kind in (set, frozenset) else value
        of: list[Json] = [
            _pack(item, f"{inner}{i}", tensors, keep_tags)
            for i, item in enumerate(values)
        ]
        tagged: dict[str, Json] = {TAG: kind.__name__.lower(), "of": of}
        return (
            {**tagged, "maxlen": value.maxlen} if kind is collections.deque else tagged
        )
    return _pack_scalar(value, path, tensors)


def _add(value: Tensor | Slice, path: str, tensors: dict[str, Tensor | Slice]) -> str:
    """Add a tensor under its path, made unique, and return its key."""
    key, n = path, 0
    while key in tensors:
        n += 1
        key = f"{path}#{n}"
    tensors[key] = value
    return key


def _pack_scalar(value: Any, path: str, tensors: dict[str, Tensor | Slice]) -> Json:
    if isinstance(value, (bytes, bytearray)):
        return {TAG: "bytes", "of": base64.b64encode(value).decode()}
    if isinstance(value, complex):
        return {TAG: "complex", "of": [_number(value.real), _number(value.imag)]}
    if isinstance(value, (torch.dtype, torch.device)):
        return {TAG: type(value).__name__, "of": str(value).removeprefix("torch.")}
    if isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in "biufc":
        array = torch.from_numpy(np.ascontiguousarray(value)).reshape(value.shape)
        kind = "ndarray" if isinstance(value, np.ndarray) else "npscalar"
        return {TAG: kind, "key": _add(array, path, tensors)}
    if isinstance(value, dt.datetime):
        return {TAG: "datetime", "of": value.isoformat()}
    if isinstance(value, dt.timedelta):
        return {TAG: "timedelta", "of": _number(value.total_seconds())}
    if isinstance(value, PurePath):
        return {TAG: "path", "of": str(value)}
    raise _unsupported(value, path)


# Any: the user's state
def unpack(data: Json, tensors: Mapping[str, Tensor | Slice]) -> Any:
    """Return the value that was given to `pack`.

    Raises: CorruptCheckpointError when the JSON was not written by `pack`.
    """
    try:
        return _unpack(data, tensors)
    except (
        LookupError,
        TypeError,
        ValueError,
        RuntimeError,
        AttributeError,
        OverflowError,
    ) as error:
        raise CorruptCheckpointError(
            f"the stored structure cannot be rebuilt ({type(error).__name__}: {error}); the file is damaged or was "
            "edited. Load another checkpoint."
        ) from error


def to_native(data: Json, tensors: Mapping[str, Tensor | Slice]) -> Any:
    """Return the value in types that torch's restricted loader can read; other types stay tagged dicts."""
    if isinstance(data, list):
        return list(map(to_native, data, repeat(tensors)))
    if not isinstance(data, dict):
        return data
    kind = data.get(TAG)
    if kind == "tensor" and isinstance(data["key"], str):
        return tensors[data["key"]]
    if kind in ("ndarray", "npscalar"):
        return {TAG: kind, "key": tensors[str(data["key"])]}
    confusable = kind == "dict" and any(pair[0] == TAG for pair in _pairs_of(data))
    if (
        kind is None
        or confusable
        or kind in ("deque", "frozenset", "datetime", "timedelta", "path")
    ):
        return dict(
            zip(data, map(to_native, data.values(), repeat(tensors)), strict=True)
        )
    if "of" in data and kind in _BUILDERS:
        return _BUILDERS[str(kind)](to_native(data["of"], tensors))
    return _unpack(data, tensors)


def from_native(value: Any) -> tuple[Json, dict[str, Tensor | Slice]]:
    """Return JSON and tensors for a value made by `to_native`, or for state that other tools saved."""
    tensors: dict[str, Tensor | Slice] = {}
    return _pack(value, "", tensors, keep_tags=True), tensors


def _unpack(data: Json, tensors: Mapping[str, Tensor | Slice]) -> Any:
    if isinstance(data, list):
        return list(map(_unpack, data, repeat(tensors)))
    if not isinstance(data, dict):
        return data
    if TAG not in data:
        return dict(
            zip(data, map(_unpack, data.values(), repeat(tensors)), strict=True)
        )
    kind = data[TAG]
    if kind in ("tensor", "ndarray", "npscalar"):
        key = data["key"]
        value = _unpack(key, tensors) if isinstance(key, dict) else tensors[str(key)]
        return value if kind == "tensor" else _array(str(kind), value)
    if kind in _READERS:
        return _READERS[str(kind)](data["of"])
    if not isinstance(data["of"], list):
        raise TypeError(f"expected a list, found {type(data['of']).__name__}")
    items = _unpack(data["of"], tensors)
    if kind == "deque":
        return collections.deque(items, maxlen=_as_maxlen(data["maxlen"]))
    return _BUILDERS[str(kind)](items)


def _array(kind: str, value: Tensor | Slice) -> Any:
    if isinstance(value, Slice):
        return value
    array = value.detach().cpu().numpy()
    return array if kind == "ndarray" else array.reshape(-1)[0]


def _as_list(value: Json) -> list[Json]:
    if not isinstance(value, list):
        raise TypeError(f"expected a list, found {type(value).__name__}")
    return value


def _pairs_of(data: dict[str, Json]) -> list[list[Json]]:
    return [_as_list(pair) for pair in _as_list(data["of"])]


def _as_maxlen(value: Json) -> int | None:
    if value is not None and (not isinstance(value, int) or value < 0):
        raise TypeError(f"expected a length, found {value!r}")
    return value


def _number(value: int | float) -> Json:
    return value if math.isfinite(value) else {TAG: "float", "of": str(value)}


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name)
    if not isinstance(found, torch.dtype):
        raise TypeError(f"{name!r} is not a dtype")
    return found


def _complex(parts: Any) -> complex:
    real, imag = (_unpack(part, {}) for part in parts)
    return complex(float(real), float(imag))


# Any: checked by the callables themselves
_READERS: Final = MappingProxyType[str, Callable[[Any], Any]](
    {
        "float": lambda text: float(str(text)),
        "bytes": lambda text: base64.b64decode(str(text), validate=True),
        "complex": _complex,
        "dtype": lambda text: _dtype(str(text)),
        "device": lambda text: torch.device(str(text)),
        "datetime": lambda text: dt.datetime.fromisoformat(str(text)),
        "timedelta": lambda seconds: dt.timedelta(seconds=float(seconds)),
        "path": lambda text: Path(str(text)),
    }
)
_MAPPINGS: Final = MappingProxyType[type, str](
    {dict: "dict", collections.OrderedDict: "ordered", collections.Counter: "counter"}
)
_BUILDERS: Final = MappingProxyType[str, Callable[[Any], Any]](
    {
        "tuple": tuple,
        "size": torch.Size,
        "set": set,
        "frozenset": frozenset,
        "dict": dict,
        "ordered": collections.OrderedDict,
        "counter": lambda pairs: collections.Counter(dict(pairs)),
    }
)


def _unsupported(value: Any, path: str) -> CheckpointError:
    return CheckpointError(
        f"{path or 'the state'} holds a {type(value).__module__}.{type(value).__qualname__}, which cannot be stored "
        "without pickle, and hasten never loads pickles by itself. Return tensors, numbers, strings, lists and dicts "
        "from state_dict()."
    )
