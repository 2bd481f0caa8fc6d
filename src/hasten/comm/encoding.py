"""Encoding of plain Python values, arrays and tensors as bytes; decoding never runs code, regardless of the sender.

Supports the values that the library exchanges: numbers, text, bytes, lists, tuples, dicts, sets, paths, tensors, arrays, and hasten's
dataclasses. A decoded value has its original types. Other values are refused.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from enum import Enum
from pathlib import PosixPath
from types import MappingProxyType
from typing import Any, Final

import msgspec
import numpy as np
import torch
from torch import Tensor

from hasten.errors import CommError

# Any in this file: values of every type.
_TUPLE, _SET, _FROZENSET, _DICT, _INT, _COMPLEX, _PATH = 1, 2, 3, 4, 5, 6, 7
_TENSOR, _DTYPE, _DEVICE, _SIZE, _ARRAY, _SCALAR = 10, 11, 12, 13, 14, 15
_RECORD, _ENUM = 20, 21

_AS_IT_IS: Final = frozenset({type(None), bool, float, str, bytes})
_OWN: Final = "hasten."
_MAX_LEVELS: Final = 60
_MAX_BYTES: Final = 1 << 30  # one item of the format holds less than 4 GiB


@dataclasses.dataclass(frozen=True, slots=True)
class Codec:
    """Functions that turn an object into bytes and back; both raise CommError for what they do not support."""

    encode: Callable[[Any], bytes]
    decode: Callable[[bytes], Any]


def encode(value: Any) -> bytes:
    """Return the value as bytes.

    Raises: CommError for a value that the format does not support.
    """
    try:
        return msgspec.msgpack.encode(_lower(value, 0))
    except (
        UnicodeEncodeError,
        OverflowError,
        msgspec.MsgspecError,
        ValueError,
    ) as error:
        raise _unsupported(value, str(error)) from error


def decode(data: bytes) -> Any:
    """Return the value that was encoded.

    Raises: CommError for bytes that are not an encoded value.
    """
    try:
        return msgspec.msgpack.decode(data, ext_hook=_raise_ext)
    except (
        msgspec.MsgspecError,
        ValueError,
        TypeError,
        RuntimeError,
        AttributeError,
        IndexError,
    ) as error:
        raise CommError(
            f"a message of {len(data)} bytes from another rank cannot be decoded ({error}): it was damaged in transit or "
            f"was not sent by this version of hasten. Use the same version on every machine."
        ) from error


PLAIN: Final = Codec(encode, decode)


def _unsupported(value: Any, reason: str) -> CommError:
    return CommError(
        f"a {type(value).__qualname__} cannot be sent to other ranks ({reason}), because hasten never unpickles what another process "
        "sends. Send what it is made of: numbers, text, lists, dicts, arrays, tensors."
    )


def _lower(value: Any, level: int) -> Any:
    """Return a value of msgpack's types; others are marked by an extension code."""
    kind = type(value)
    if kind in _AS_IT_IS:
        return value
    if kind is int:
        return value if -(1 << 63) <= value < 1 << 63 else _ext(_INT, str(value))
    if level > _MAX_LEVELS:
        raise ValueError(f"it is nested more than {_MAX_LEVELS} levels deep")
    if kind is list:
        return [_lower(item, level + 1) for item in value]
    if kind is dict and all(type(key) is str for key in value):
        return {key: _lower(item, level + 1) for key, item in value.items()}
    if kind is dict:
        return _ext(
            _DICT, [_lower(part, level + 1) for item in value.items() for part in item]
        )
    if kind in _SEQUENCES:
        return _ext(_SEQUENCES[kind], [_lower(item, level + 1) for item in value])
    if kind in _LOWER:
        return _LOWER[kind](value)
    return _lower_object(value, level)


def _lower_object(value: Any, level: int) -> Any:
    """Return a scalar of numpy, or a record or enumeration of hasten, as an extension of msgpack."""
    kind = type(value)
    if isinstance(value, np.generic):
        return _ext(_SCALAR, [_array_dtype(value.dtype), value.tobytes()])
    if kind.__module__.startswith(_OWN) and "<" not in kind.__qualname__:
        if isinstance(value, Enum):
            return _ext(_ENUM, [kind.__module__, kind.__qualname__, value.value])
        if (names := _record_fields(kind)) is not None:
            parts = [_lower(getattr(value, name), level + 1) for name in names]
            return _ext(_RECORD, [kind.__module__, kind.__qualname__, parts])
    raise ValueError(f"it holds a {kind.__module__}.{kind.__qualname__}")


def _ext(code: int, content: Any) -> msgspec.msgpack.Ext:
    return msgspec.msgpack.Ext(code, msgspec.msgpack.encode(content))


def _tensor(x: Tensor) -> msgspec.msgpack.Ext:
    if x.layout != torch.strided or x.is_quantized or x.device.type == "meta":
        raise ValueError(f"it holds a tensor of layout {x.layout} on {x.device}")
    if x.numel() * x.element_size() > _MAX_BYTES:
        raise ValueError("it holds a tensor of more than 1 GiB")
    data = (
        x.detach()
        .resolve_conj()
        .resolve_neg()
        .cpu()
        .contiguous()
        .reshape(-1)
        .view(torch.uint8)
        .numpy()
        .tobytes()
    )
    return _ext(
        _TENSOR,
        [_dtype_name(x.dtype), list(x.shape), str(x.device), x.requires_grad, data],
    )


def _raise_tensor(
    name: str, shape: list[int], device: str, grad: bool, data: bytes
) -> Tensor:
    dtype = _dtype(name)
    flat = (
        torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype)
        if data
        else torch.empty(0, dtype=dtype)
    )
    x = flat.reshape(shape).to(torch.device(device))
    return x.requires_grad_() if grad else x


def _array(x: np.ndarray[Any, Any]) -> msgspec.msgpack.Ext:
    if x.nbytes > _MAX_BYTES:
        raise ValueError("it holds an array of more than 1 GiB")
    return _ext(_ARRAY, [_array_dtype(x.dtype), list(x.shape), x.tobytes()])


def _array_dtype(dtype: np.dtype[Any]) -> str:
    if (
        dtype.hasobject
        or dtype.fields is not None
        or dtype.subdtype is not None
        or np.dtype(dtype.str) != dtype
    ):
        raise ValueError(f"it holds an array of dtype {dtype}")
    return dtype.str


def _raise_array(dtype: str, shape: list[int], data: bytes) -> np.ndarray[Any, Any]:
    return np.frombuffer(bytearray(data), dtype=_plain_dtype(dtype)).reshape(shape)


def _raise_scalar(dtype: str, data: bytes) -> Any:
    return np.frombuffer(data, dtype=_plain_dtype(dtype))[0]


def _plain_dtype(text: str) -> np.dtype[Any]:
    dtype = np.dtype(text)
    if dtype.hasobject:
        raise ValueError(f"dtype {text!r} holds Python objects")
    return dtype


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name!r} is not a dtype")
    return found


def _record_fields(kind: type) -> tuple[str, ...] | None:
    """Return the fields of a record class whose constructor only stores them; None for any other class."""
    if hasattr(kind, "__post_init__"):
        return None
    if issubclass(kind, msgspec.Struct):
        return kind.__struct_fields__
    if dataclasses.is_dataclass(kind):
        fields = dataclasses.fields(kind)
        return tuple(f.name for f in fields) if all(f.init for f in fields) else None
    if issubclass(kind, tuple):
        names: tuple[str, ...] | None = getattr(kind, "_fields", None)
        return names
    return None


def _own_class(module: str, name: str) -> type:
    """Return an already imported class of hasten; a message never causes an import."""
    found: Any = sys.modules.get(module) if module.startswith(_OWN) else None
    for part in name.split("."):
        found = getattr(found, part, None)
    if not isinstance(found, type) or found.__module__ != module:
        raise ValueError(f"{module}.{name} is not a record of hasten's")
    return found


def _raise_record(module: str, name: str, parts: list[Any]) -> Any:
    kind = _own_class(module, name)
    names = _record_fields(kind)
    if names is None:
        raise ValueError(f"{module}.{name} is not a record of hasten's")
    return kind(**dict(zip(names, parts, strict=True)))


def _raise_enum(module: str, name: str, value: Any) -> Any:
    kind = _own_class(module, name)
    if not issubclass(kind, Enum):
        raise ValueError(f"{module}.{name} is not an enumeration")
    return kind(value)


def _pairs(*flat: Any) -> dict[Any, Any]:
    return dict(zip(flat[::2], flat[1::2], strict=True))


_SEQUENCES: Final[MappingProxyType[type, int]] = MappingProxyType(
    {tuple: _TUPLE, set: _SET, frozenset: _FROZENSET}
)
_LOWER: Final[MappingProxyType[type, Callable[[Any], msgspec.msgpack.Ext]]] = (
    MappingProxyType(
        {
            complex: lambda z: _ext(_COMPLEX, [z.real, z.imag]),
            PosixPath: lambda path: _ext(_PATH, str(path)),
            Tensor: _tensor,
            torch.dtype: lambda dtype: _ext(_DTYPE, _dtype_name(dtype)),
            torch.device: lambda device: _ext(_DEVICE, str(device)),
            torch.Size: lambda size: _ext(_SIZE, list(size)),
            np.ndarray: _array,
        }
    )
)
_RAISE: Final[MappingProxyType[int, Callable[..., Any]]] = MappingProxyType(
    {
        _TUPLE: lambda *items: items,
        _SET: lambda *items: set(items),
        _FROZENSET: lambda *items: frozenset(items),
        _DICT: _pairs,
        _INT: int,
        _COMPLEX: complex,
        _PATH: PosixPath,
        _TENSOR: _raise_tensor,
        _DTYPE: _dtype,
        _DEVICE: torch.device,
        _SIZE: lambda *sizes: torch.Size(sizes),
        _ARRAY: _raise_array,
        _SCALAR: _raise_scalar,
        _RECORD: _raise_record,
        _ENUM: _raise_enum,
    }
)


def _raise_ext(code: int, data: memoryview) -> Any:
    build = _RAISE.get(code)
    if build is None:
        raise ValueError(f"item kind {code} is unknown")
    content = msgspec.msgpack.decode(data, ext_hook=_raise_ext)
    return build(*content) if isinstance(content, list) else build(content)
