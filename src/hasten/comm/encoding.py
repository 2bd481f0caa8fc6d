"""Encoding of plain Python values, arrays and tensors as bytes; decoding never runs code, regardless of the sender.

Supports the values that the library exchanges: numbers, text, bytes, lists, tuples, dicts, sets, paths, tensors, arrays, and hasten's
dataclasses. A decoded value has its original types. Other values are refused.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from enum import Enum
from itertools import chain
from pathlib import PosixPath
from types import MappingProxyType
from typing import Any, Final

import msgspec
import numpy as np
import torch
from torch import Tensor

from hasten.errors import CommError

# Any in this file: values of every type.
_TUPLE = 1
_SET = 2
_FROZENSET = 3
_DICT = 4
_INT = 5
_COMPLEX = 6
_PATH = 7
_TENSOR = 10
_DTYPE = 11
_DEVICE = 12
_SIZE = 13
_ARRAY = 14
_SCALAR = 15
_RECORD = 20
_ENUM = 21

_MSGPACK_TYPES: Final = frozenset({type(None), bool, float, str, bytes})
_LIBRARY_PREFIX: Final = "hasten."
_MAX_LEVELS: Final = 60
_MAX_BYTES: Final = 1 << 30  # one item of the format holds less than 4 GiB


@dataclasses.dataclass(frozen=True, slots=True)
class Codec:
    """Functions that turn an object into bytes and back; both raise CommError for what they do not support."""

    encode: Callable[[Any], bytes]
    decode: Callable[[bytes], Any]


def encode(python_value: Any) -> bytes:
    """Return the value as bytes.

    Raises: CommError for a value that the format does not support.
    """
    try:
        return msgspec.msgpack.encode(_to_msgpack(python_value, 0))
    except (
        UnicodeEncodeError,
        OverflowError,
        msgspec.MsgspecError,
        ValueError,
    ) as error:
        raise _unsupported_error(python_value, str(error)) from error


def decode(message: bytes) -> Any:
    """Return the value that was encoded.

    Raises: CommError for bytes that are not an encoded value.
    """
    try:
        return msgspec.msgpack.decode(message, ext_hook=_build_extension)
    except (
        msgspec.MsgspecError,
        ValueError,
        TypeError,
        RuntimeError,
        AttributeError,
        IndexError,
    ) as error:
        raise CommError(
            f"a message of {len(message)} bytes from another rank cannot be decoded ({error}): it was damaged in transit or "
            f"was not sent by this version of hasten. Use the same version on every machine."
        ) from error


PLAIN: Final = Codec(encode, decode)


def _unsupported_error(python_value: Any, reason: str) -> CommError:
    return CommError(
        f"a {type(python_value).__qualname__} cannot be sent to other ranks ({reason}), because hasten never unpickles what another process "
        "sends. Send what it is made of: numbers, text, lists, dicts, arrays, tensors."
    )


def _to_msgpack(python_value: Any, nesting_level: int) -> Any:
    """Return a value of msgpack's types; others are marked by an extension code."""
    value_type = type(python_value)
    if value_type in _MSGPACK_TYPES:
        return python_value
    if value_type is int:
        if -(1 << 63) <= python_value < 1 << 63:
            return python_value
        return _extension_of(_INT, str(python_value))
    if nesting_level > _MAX_LEVELS:
        raise ValueError(f"it is nested more than {_MAX_LEVELS} levels deep")
    if value_type is list:
        return [_to_msgpack(element, nesting_level + 1) for element in python_value]
    if value_type is dict and all(type(key) is str for key in python_value):
        converted_mapping = {}
        for key, element in python_value.items():
            converted_mapping[key] = _to_msgpack(element, nesting_level + 1)
        return converted_mapping
    if value_type is dict:
        return _extension_of(
            _DICT,
            [
                _to_msgpack(element, nesting_level + 1)
                for element in chain.from_iterable(python_value.items())
            ],
        )
    if value_type in _SEQUENCES:
        return _extension_of(
            _SEQUENCES[value_type],
            [_to_msgpack(element, nesting_level + 1) for element in python_value],
        )
    if value_type in _ENCODERS:
        return _ENCODERS[value_type](python_value)
    return _object_to_msgpack(python_value, nesting_level)


def _object_to_msgpack(python_value: Any, nesting_level: int) -> Any:
    """Return a scalar of numpy, or a record or enumeration of hasten, as an extension of msgpack."""
    value_type = type(python_value)
    if isinstance(python_value, np.generic):
        return _extension_of(
            _SCALAR, [_array_dtype(python_value.dtype), python_value.tobytes()]
        )
    if (
        value_type.__module__.startswith(_LIBRARY_PREFIX)
        and "<" not in value_type.__qualname__
    ):
        if isinstance(python_value, Enum):
            return _extension_of(
                _ENUM,
                [value_type.__module__, value_type.__qualname__, python_value.value],
            )
        if (field_names := _record_fields(value_type)) is not None:
            field_values = []
            for field_name in field_names:
                field_values.append(
                    _to_msgpack(getattr(python_value, field_name), nesting_level + 1)
                )
            return _extension_of(
                _RECORD, [value_type.__module__, value_type.__qualname__, field_values]
            )
    raise ValueError(f"it holds a {value_type.__module__}.{value_type.__qualname__}")


def _extension_of(extension_code: int, content: Any) -> msgspec.msgpack.Ext:
    return msgspec.msgpack.Ext(extension_code, msgspec.msgpack.encode(content))


def _encode_tensor(tensor: Tensor) -> msgspec.msgpack.Ext:
    if (
        tensor.layout != torch.strided
        or tensor.is_quantized
        or tensor.device.type == "meta"
    ):
        raise ValueError(
            f"it holds a tensor of layout {tensor.layout} on {tensor.device}"
        )
    if tensor.numel() * tensor.element_size() > _MAX_BYTES:
        raise ValueError("it holds a tensor of more than 1 GiB")
    raw_bytes = (
        tensor.detach()
        .resolve_conj()
        .resolve_neg()
        .cpu()
        .contiguous()
        .reshape(-1)
        .view(torch.uint8)
        .numpy()
        .tobytes()
    )
    return _extension_of(
        _TENSOR,
        [
            _dtype_name(tensor.dtype),
            list(tensor.shape),
            str(tensor.device),
            tensor.requires_grad,
            raw_bytes,
        ],
    )


def _build_tensor(
    dtype_name: str,
    shape: list[int],
    device: str,
    requires_grad: bool,
    raw_bytes: bytes,
) -> Tensor:
    dtype = _dtype_named(dtype_name)
    if raw_bytes:
        flat_tensor = torch.frombuffer(bytearray(raw_bytes), dtype=torch.uint8).view(
            dtype
        )
    else:
        flat_tensor = torch.empty(0, dtype=dtype)
    tensor = flat_tensor.reshape(shape).to(torch.device(device))
    return tensor.requires_grad_() if requires_grad else tensor


def _encode_array(array: np.ndarray[Any, Any]) -> msgspec.msgpack.Ext:
    if array.nbytes > _MAX_BYTES:
        raise ValueError("it holds an array of more than 1 GiB")
    dtype_text = _array_dtype(array.dtype)
    return _extension_of(_ARRAY, [dtype_text, list(array.shape), array.tobytes()])


def _array_dtype(dtype: np.dtype[Any]) -> str:
    if (
        dtype.hasobject
        or dtype.fields is not None
        or dtype.subdtype is not None
        or np.dtype(dtype.str) != dtype
    ):
        raise ValueError(f"it holds an array of dtype {dtype}")
    return dtype.str


def _build_array(
    dtype_text: str, shape: list[int], raw_bytes: bytes
) -> np.ndarray[Any, Any]:
    return np.frombuffer(bytearray(raw_bytes), dtype=_plain_dtype(dtype_text)).reshape(
        shape
    )


def _build_scalar(dtype_text: str, raw_bytes: bytes) -> Any:
    return np.frombuffer(raw_bytes, dtype=_plain_dtype(dtype_text))[0]


def _plain_dtype(dtype_text: str) -> np.dtype[Any]:
    dtype = np.dtype(dtype_text)
    if dtype.hasobject:
        raise ValueError(f"dtype {dtype_text!r} holds Python objects")
    return dtype


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype_named(dtype_name: str) -> torch.dtype:
    torch_dtype = getattr(torch, dtype_name)
    if not isinstance(torch_dtype, torch.dtype):
        raise ValueError(f"{dtype_name!r} is not a dtype")
    return torch_dtype


def _record_fields(record_class: type) -> tuple[str, ...] | None:
    """Return the fields of a record class whose constructor only stores them; None for any other class."""
    if hasattr(record_class, "__post_init__"):
        return None
    if issubclass(record_class, msgspec.Struct):
        return record_class.__struct_fields__
    if dataclasses.is_dataclass(record_class):
        record_fields = dataclasses.fields(record_class)
        if all(record_field.init for record_field in record_fields):
            return tuple(record_field.name for record_field in record_fields)
        return None
    if issubclass(record_class, tuple):
        field_names: tuple[str, ...] | None = getattr(record_class, "_fields", None)
        return field_names
    return None


def _library_class(module_name: str, class_name: str) -> type:
    """Return an already imported class of hasten; a message never causes an import."""
    if module_name.startswith(_LIBRARY_PREFIX):
        library_class: Any = sys.modules.get(module_name)
    else:
        library_class = None
    for name_part in class_name.split("."):
        library_class = getattr(library_class, name_part, None)
    if not isinstance(library_class, type) or library_class.__module__ != module_name:
        raise ValueError(f"{module_name}.{class_name} is not a record of hasten's")
    return library_class


def _build_record(module_name: str, class_name: str, field_values: list[Any]) -> Any:
    record_class = _library_class(module_name, class_name)
    field_names = _record_fields(record_class)
    if field_names is None:
        raise ValueError(f"{module_name}.{class_name} is not a record of hasten's")
    return record_class(**dict(zip(field_names, field_values, strict=True)))


def _build_enum(module_name: str, class_name: str, member_value: Any) -> Any:
    enum_class = _library_class(module_name, class_name)
    if not issubclass(enum_class, Enum):
        raise ValueError(f"{module_name}.{class_name} is not an enumeration")
    return enum_class(member_value)


def _build_dict(*keys_and_values: Any) -> dict[Any, Any]:
    return dict(zip(keys_and_values[::2], keys_and_values[1::2], strict=True))


_SEQUENCES: Final[MappingProxyType[type, int]] = MappingProxyType(
    {tuple: _TUPLE, set: _SET, frozenset: _FROZENSET}
)
_ENCODERS: Final[MappingProxyType[type, Callable[[Any], msgspec.msgpack.Ext]]] = (
    MappingProxyType(
        {
            complex: lambda z: _extension_of(_COMPLEX, [z.real, z.imag]),
            PosixPath: lambda path: _extension_of(_PATH, str(path)),
            Tensor: _encode_tensor,
            torch.dtype: lambda dtype: _extension_of(_DTYPE, _dtype_name(dtype)),
            torch.device: lambda device: _extension_of(_DEVICE, str(device)),
            torch.Size: lambda size: _extension_of(_SIZE, list(size)),
            np.ndarray: _encode_array,
        }
    )
)
_BUILDERS: Final[MappingProxyType[int, Callable[..., Any]]] = MappingProxyType(
    {
        _TUPLE: lambda *items: items,
        _SET: lambda *items: set(items),
        _FROZENSET: lambda *items: frozenset(items),
        _DICT: _build_dict,
        _INT: int,
        _COMPLEX: complex,
        _PATH: PosixPath,
        _TENSOR: _build_tensor,
        _DTYPE: _dtype_named,
        _DEVICE: torch.device,
        _SIZE: lambda *sizes: torch.Size(sizes),
        _ARRAY: _build_array,
        _SCALAR: _build_scalar,
        _RECORD: _build_record,
        _ENUM: _build_enum,
    }
)


def _build_extension(extension_code: int, encoded_content: memoryview) -> Any:
    build_value = _BUILDERS.get(extension_code)
    if build_value is None:
        raise ValueError(f"item kind {extension_code} is unknown")
    content = msgspec.msgpack.decode(encoded_content, ext_hook=_build_extension)
    if isinstance(content, list):
        return build_value(*content)
    return build_value(content)
