"""Conversion of nested state into JSON plus named tensors and back, without pickle."""

from __future__ import annotations

import base64
import collections
import datetime as dt
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path, PurePath
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from hasten.checkpoint.base import Json, Slice
from hasten.errors import CheckpointError, CorruptCheckpointError

TAG = "$"  # a JSON object with this key represents a value that JSON does not have


class _Packer:
    """Collector of the tensors of one tree; `keep_tags` leaves dicts that are tagged already unchanged."""

    def __init__(self, keep_tags: bool = False) -> None:
        self._keep_tags = keep_tags
        self.tensors: dict[str, Tensor | Slice] = {}

    def pack(self, value: Any, path: str) -> Json:  # Any: the user's state
        if value is None or isinstance(value, (bool, str)):
            return value if not isinstance(value, str) else str(value)
        if isinstance(value, (Tensor, Slice)):
            return {TAG: "tensor", "key": self._keep(value, path)}
        if type(value) is int:
            return value
        if type(value) is float:
            return _number(value)
        if isinstance(value, Mapping):
            return self._mapping(value, path)
        return self._sequence(value, path)

    def _keep(self, value: Tensor | Slice, path: str) -> str:
        key, n = path, 0
        while key in self.tensors:
            n += 1
            key = f"{path}#{n}"
        self.tensors[key] = value
        return key

    def _mapping(self, value: Mapping[Any, Any], path: str) -> Json:
        if type(value) is dict or type(value).__name__ in ("mappingproxy",):
            if all(type(key) is str for key in value) and (self._keep_tags or TAG not in value):
                return {key: self.pack(item, _join(path, key)) for key, item in value.items()}
            return {TAG: "dict", "of": self._pairs(value, path)}
        for kind, cls in (("ordered", collections.OrderedDict), ("counter", collections.Counter)):
            if type(value) is cls:
                return {TAG: kind, "of": self._pairs(value, path)}
        raise _unsupported(value, path)

    def _pairs(self, value: Mapping[Any, Any], path: str) -> list[Json]:
        return [[self.pack(key, f"{path}/key"), self.pack(item, _join(path, str(key)))] for key, item in value.items()]

    def _items(self, value: Iterable[Any], path: str) -> list[Json]:
        return [self.pack(item, _join(path, str(i))) for i, item in enumerate(value)]

    def _sequence(self, value: Any, path: str) -> Json:
        kind = type(value)
        if kind is list:
            return self._items(value, path)
        if kind in (tuple, torch.Size):
            return {TAG: "tuple" if kind is tuple else "size", "of": self._items(value, path)}
        if kind in (set, frozenset):
            return {TAG: kind.__name__, "of": self._items(sorted(value, key=repr), path)}
        if kind is collections.deque:
            return {TAG: "deque", "of": self._items(value, path), "maxlen": value.maxlen}
        return self._scalar(value, path)

    def _scalar(self, value: Any, path: str) -> Json:
        if isinstance(value, (bytes, bytearray)):
            return {TAG: "bytes", "of": base64.b64encode(value).decode()}
        if isinstance(value, complex):
            return {TAG: "complex", "of": [_number(value.real), _number(value.imag)]}
        if isinstance(value, (torch.dtype, torch.device)):
            return {TAG: type(value).__name__, "of": str(value).removeprefix("torch.")}
        if isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in "biufc":
            array = torch.from_numpy(np.ascontiguousarray(value)).reshape(value.shape)
            kind = "ndarray" if isinstance(value, np.ndarray) else "npscalar"
            return {TAG: kind, "key": self._keep(array, path)}
        if isinstance(value, dt.datetime):
            return {TAG: "datetime", "of": value.isoformat()}
        if isinstance(value, dt.timedelta):
            return {TAG: "timedelta", "of": _number(value.total_seconds())}
        if isinstance(value, PurePath):
            return {TAG: "path", "of": str(value)}
        raise _unsupported(value, path)


def pack(value: Any, path: str = "") -> tuple[Json, dict[str, Tensor | Slice]]:
    """Return JSON that describes the value, and the tensors in it by name.

    Raises: CheckpointError naming the path of a value that cannot be stored without pickle.
    """
    packer = _Packer()
    return packer.pack(value, path), packer.tensors


def unpack(data: Json, tensors: Mapping[str, Tensor | Slice]) -> Any:  # Any: the user's state
    """Return the value that was given to `pack`.

    Raises: CorruptCheckpointError when the JSON was not written by `pack`.
    """
    try:
        return _unpack(data, tensors)
    except (LookupError, TypeError, ValueError, RuntimeError, AttributeError, OverflowError) as error:
        raise CorruptCheckpointError(
            f"the stored structure cannot be rebuilt ({type(error).__name__}: {error}); the file is damaged or was "
            "edited. Load another checkpoint."
        ) from error


def to_native(data: Json, tensors: Mapping[str, Tensor | Slice]) -> Any:
    """Return the value in types that torch's restricted loader can read; other types stay tagged dicts."""
    if isinstance(data, list):
        return [to_native(item, tensors) for item in data]
    if not isinstance(data, dict):
        return data
    kind = data.get(TAG)
    if kind in ("ndarray", "npscalar"):
        return {TAG: kind, "key": tensors[str(data["key"])]}
    confusable = kind == "dict" and any(pair[0] == TAG for pair in _pairs_of(data))
    if kind is None or confusable or kind in ("deque", "frozenset", "datetime", "timedelta", "path"):
        return {key: to_native(item, tensors) for key, item in data.items()}
    if "of" in data and kind in _BUILDERS:
        return _BUILDERS[str(kind)](to_native(data["of"], tensors))
    return _unpack(data, tensors)


def from_native(value: Any) -> tuple[Json, dict[str, Tensor | Slice]]:
    """Return JSON and tensors for a value made by `to_native`, or for state that other tools saved."""
    packer = _Packer(keep_tags=True)
    return packer.pack(value, ""), packer.tensors


def _unpack(data: Json, tensors: Mapping[str, Tensor | Slice]) -> Any:
    if isinstance(data, list):
        return [_unpack(item, tensors) for item in data]
    if not isinstance(data, dict):
        return data
    if TAG not in data:
        return {key: _unpack(item, tensors) for key, item in data.items()}
    kind = data[TAG]
    if kind in ("tensor", "ndarray", "npscalar"):
        key = data["key"]
        return _tensor_value(str(kind), _unpack(key, tensors) if isinstance(key, dict) else tensors[str(key)])
    if kind in _READERS:
        return _READERS[str(kind)](data["of"])
    items = _unpack(_as_list(data["of"]), tensors)
    if kind == "deque":
        return collections.deque(items, maxlen=_as_maxlen(data["maxlen"]))
    return _BUILDERS[str(kind)](items)


def _tensor_value(kind: str, value: Tensor | Slice) -> Any:
    if kind == "tensor" or isinstance(value, Slice):
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


_READERS: Final = MappingProxyType[str, Callable[[Any], Any]](  # Any: checked by the callables themselves
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


def _join(path: str, key: str) -> str:
    return f"{path}/{key}" if path else key


def _unsupported(value: Any, path: str) -> CheckpointError:
    return CheckpointError(
        f"{path or 'the state'} holds a {type(value).__module__}.{type(value).__qualname__}, which cannot be stored "
        "without pickle, and hasten never loads pickles by itself. Return tensors, numbers, strings, lists and dicts "
        "from state_dict()."
    )
