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
def pack(state: Any, state_path: str = "") -> tuple[Json, dict[str, Tensor | Slice]]:
    """Return JSON that describes the value, and the tensors in it by name.

    Raises: CheckpointError naming the path of a value that cannot be stored without pickle.
    """
    tensors: dict[str, Tensor | Slice] = {}
    return _pack(state, state_path, tensors, keep_tags=False), tensors


def _pack(
    state: Any, state_path: str, tensors: dict[str, Tensor | Slice], keep_tags: bool
) -> Json:
    """Return JSON for a value and add its tensors; `keep_tags` leaves dicts that are tagged already unchanged."""
    state_class = type(state)
    if state is None or state_class is int or isinstance(state, bool):
        return state  # type: ignore[no-any-return]  # one of three JSON types
    if isinstance(state, str):
        return str(state)
    if state_class is float and math.isfinite(state):
        return state  # type: ignore[no-any-return]  # a JSON number
    if isinstance(state, (Tensor, Slice)):
        # equal paths are made unique
        tensor_key = state_path
        suffix_number = 0
        while tensor_key in tensors:
            suffix_number += 1
            tensor_key = f"{state_path}#{suffix_number}"
        tensors[tensor_key] = state
        return {TAG: "tensor", "key": tensor_key}
    inner_path = f"{state_path}/" if state_path else ""
    if state_class in (list, tuple):
        packed_list: list[Json] = []
        for index, inner_state in enumerate(state):
            packed_list.append(
                _pack(inner_state, f"{inner_path}{index}", tensors, keep_tags)
            )
        return packed_list if state_class is list else {TAG: "tuple", "of": packed_list}
    if (
        state_class is dict
        and {*map(type, state)} <= {str}
        and (keep_tags or TAG not in state)
    ):
        packed_dict: dict[str, Json] = {}
        for state_key, inner_state in state.items():
            packed_dict[state_key] = _pack(
                inner_state, inner_path + state_key, tensors, keep_tags
            )
        return packed_dict
    return _pack_tagged(state, state_path, tensors, keep_tags)


def _pack_tagged(
    state: Any, state_path: str, tensors: dict[str, Tensor | Slice], keep_tags: bool
) -> Json:
    """Return tagged JSON for a value of a type that JSON does not have."""
    state_class = type(state)
    inner_path = f"{state_path}/" if state_path else ""
    if state_class is MappingProxyType:
        return _pack(dict(state), state_path, tensors, keep_tags)
    if state_class in _MAPPINGS:
        packed_pairs: list[Json] = [
            [
                _pack(state_key, f"{state_path}/key", tensors, keep_tags),
                _pack(inner_state, f"{inner_path}{state_key}", tensors, keep_tags),
            ]
            for state_key, inner_state in state.items()
        ]
        return {TAG: _MAPPINGS[state_class], "of": packed_pairs}
    if state_class in (torch.Size, set, frozenset, collections.deque):
        if state_class in (set, frozenset):
            inner_states = sorted(state, key=repr)
        else:
            inner_states = state
        packed_states: list[Json] = [
            _pack(inner_state, f"{inner_path}{index}", tensors, keep_tags)
            for index, inner_state in enumerate(inner_states)
        ]
        tagged: dict[str, Json] = {
            TAG: state_class.__name__.lower(),
            "of": packed_states,
        }
        if state_class is collections.deque:
            return {**tagged, "maxlen": state.maxlen}
        return tagged
    return _pack_scalar(state, state_path, tensors)


def _pack_scalar(
    scalar: Any, state_path: str, tensors: dict[str, Tensor | Slice]
) -> Json:
    if type(scalar) is float:
        return _pack_number(scalar)
    if isinstance(scalar, (bytes, bytearray)):
        return {TAG: "bytes", "of": base64.b64encode(scalar).decode()}
    if isinstance(scalar, complex):
        return {
            TAG: "complex",
            "of": [_pack_number(scalar.real), _pack_number(scalar.imag)],
        }
    if isinstance(scalar, (torch.dtype, torch.device)):
        return {TAG: type(scalar).__name__, "of": str(scalar).removeprefix("torch.")}
    if isinstance(scalar, (np.ndarray, np.generic)) and scalar.dtype.kind in "biufc":
        array_tensor = torch.from_numpy(np.ascontiguousarray(scalar)).reshape(
            scalar.shape
        )
        array_kind = "ndarray" if isinstance(scalar, np.ndarray) else "npscalar"
        packed_array: Any = _pack(array_tensor, state_path, tensors, keep_tags=False)
        return {TAG: array_kind, "key": packed_array["key"]}
    if isinstance(scalar, dt.datetime):
        return {TAG: "datetime", "of": scalar.isoformat()}
    if isinstance(scalar, dt.timedelta):
        return {TAG: "timedelta", "of": _pack_number(scalar.total_seconds())}
    if isinstance(scalar, PurePath):
        return {TAG: "path", "of": str(scalar)}
    raise _unsupported_error(scalar, state_path)


# Any: the user's state
def unpack(packed_state: Json, tensors: Mapping[str, Tensor | Slice]) -> Any:
    """Return the value that was given to `pack`.

    Raises: CorruptCheckpointError when the JSON was not written by `pack`.
    """
    try:
        return _unpack(packed_state, tensors)
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


def to_native(packed_state: Json, tensors: Mapping[str, Tensor | Slice]) -> Any:
    """Return the value in types that torch's restricted loader can read; other types stay tagged dicts."""
    if isinstance(packed_state, list):
        return list(map(to_native, packed_state, repeat(tensors)))
    if not isinstance(packed_state, dict):
        return packed_state
    packed_kind = packed_state.get(TAG)
    if packed_kind == "tensor" and isinstance(packed_state["key"], str):
        return tensors[packed_state["key"]]
    if packed_kind in ("ndarray", "npscalar"):
        return {TAG: packed_kind, "key": tensors[str(packed_state["key"])]}
    is_confusable = packed_kind == "dict" and any(
        pair[0] == TAG for pair in _packed_pairs(packed_state)
    )
    if (
        packed_kind is None
        or is_confusable
        or packed_kind in ("deque", "frozenset", "datetime", "timedelta", "path")
    ):
        return dict(
            zip(
                packed_state,
                map(to_native, packed_state.values(), repeat(tensors)),
                strict=True,
            )
        )
    if "of" in packed_state and packed_kind in _BUILDERS:
        return _BUILDERS[str(packed_kind)](to_native(packed_state["of"], tensors))
    return _unpack(packed_state, tensors)


def from_native(native_state: Any) -> tuple[Json, dict[str, Tensor | Slice]]:
    """Return JSON and tensors for a value made by `to_native`, or for state that other tools saved."""
    tensors: dict[str, Tensor | Slice] = {}
    return _pack(native_state, "", tensors, keep_tags=True), tensors


def _unpack(packed_state: Json, tensors: Mapping[str, Tensor | Slice]) -> Any:
    if isinstance(packed_state, list):
        return list(map(_unpack, packed_state, repeat(tensors)))
    if not isinstance(packed_state, dict):
        return packed_state
    if TAG not in packed_state:
        return dict(
            zip(
                packed_state,
                map(_unpack, packed_state.values(), repeat(tensors)),
                strict=True,
            )
        )
    packed_kind = packed_state[TAG]
    if packed_kind in ("tensor", "ndarray", "npscalar"):
        tensor_key = packed_state["key"]
        if isinstance(tensor_key, dict):
            tensor = _unpack(tensor_key, tensors)
        else:
            tensor = tensors[str(tensor_key)]
        if packed_kind == "tensor":
            return tensor
        return _make_array(str(packed_kind), tensor)
    if packed_kind in _READERS:
        return _READERS[str(packed_kind)](packed_state["of"])
    if not isinstance(packed_state["of"], list):
        raise TypeError(f"expected a list, found {type(packed_state['of']).__name__}")
    inner_states = _unpack(packed_state["of"], tensors)
    if packed_kind == "deque":
        return collections.deque(
            inner_states, maxlen=_check_max_length(packed_state["maxlen"])
        )
    return _BUILDERS[str(packed_kind)](inner_states)


def _make_array(array_kind: str, tensor: Tensor | Slice) -> Any:
    if isinstance(tensor, Slice):
        return tensor
    array = tensor.detach().cpu().numpy()
    return array if array_kind == "ndarray" else array.reshape(-1)[0]


def _check_list(packed_list: Json) -> list[Json]:
    if not isinstance(packed_list, list):
        raise TypeError(f"expected a list, found {type(packed_list).__name__}")
    return packed_list


def _packed_pairs(packed_dict: dict[str, Json]) -> list[list[Json]]:
    return [_check_list(pair) for pair in _check_list(packed_dict["of"])]


def _check_max_length(max_length: Json) -> int | None:
    if max_length is not None and (not isinstance(max_length, int) or max_length < 0):
        raise TypeError(f"expected a length, found {max_length!r}")
    return max_length


def _pack_number(number: int | float) -> Json:
    return number if math.isfinite(number) else {TAG: "float", "of": str(number)}


def _parse_dtype(dtype_name: str) -> torch.dtype:
    torch_dtype = getattr(torch, dtype_name)
    if not isinstance(torch_dtype, torch.dtype):
        raise TypeError(f"{dtype_name!r} is not a dtype")
    return torch_dtype


def _parse_complex(packed_parts: Any) -> complex:
    real_part, imaginary_part = (
        _unpack(packed_part, {}) for packed_part in packed_parts
    )
    return complex(float(real_part), float(imaginary_part))


# Any: checked by the callables themselves
_READERS: Final = MappingProxyType[str, Callable[[Any], Any]](
    {
        "float": lambda text: float(str(text)),
        "bytes": lambda text: base64.b64decode(str(text), validate=True),
        "complex": _parse_complex,
        "dtype": lambda text: _parse_dtype(str(text)),
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


def _unsupported_error(unsupported_state: Any, state_path: str) -> CheckpointError:
    return CheckpointError(
        f"{state_path or 'the state'} holds a {type(unsupported_state).__module__}.{type(unsupported_state).__qualname__}, which cannot be stored "
        "without pickle, and hasten never loads pickles by itself. Return tensors, numbers, strings, lists and dicts "
        "from state_dict()."
    )
