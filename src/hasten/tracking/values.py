"""Conversion of logged values to plain ones; tensors stay on their device until a flush."""

from __future__ import annotations

import dataclasses
import math
import struct
import zlib
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hasten.errors import ArgumentError, TrackerError
from hasten.tracking.base import Pixels, Scalar

# Any: tensors and arrays are duck-typed here, so that this package does not import torch
Fetch = Callable[[Sequence[Any]], list[float]]


class Deferred:
    """A private copy of a one-element tensor, still on its device."""

    __slots__ = ("tensor",)

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor


def fetch_one_by_one(tensors: Sequence[Any]) -> list[float]:
    """Return the numbers in `tensors`, each by a separate `item()`."""
    return [tensor.item() for tensor in tensors]


def flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every value with its path, joined by slashes."""
    for key, value in values.items():
        name = key if not prefix and type(key) is str else f"{prefix}{key}"
        if type(value) not in (float, int) and isinstance(value, Mapping):
            yield from flatten(value, f"{name}/")
        else:
            yield name, value


def check_record(call: str, values: Any, step: Any, log_kwargs: Any) -> None:
    """Raise unless values are named, the step is an integer, and options are by tracker.

    Raises: ArgumentError.
    """
    if type(values) is not dict and not isinstance(values, Mapping):
        raise ArgumentError(
            f"{call}({values!r:.60}) got a {type(values).__name__}, but values need names. Pass a dict, such as "
            "{'loss': 0.5}."
        )
    if step is not None and type(step) is not int:
        is_whole = isinstance(step, float) and step.is_integer()
        if isinstance(step, bool) or not (is_whole or hasattr(step, "__index__")):
            raise ArgumentError(
                f"{call}(step={step!r:.60}) got a {type(step).__name__} that is not an integer. Pass the number of the step, or omit "
                "step to count calls."
            )
    if log_kwargs is not None:
        check_options("log_kwargs", log_kwargs)


def check_project(project: object) -> None:
    """Raise unless `project` is a name. Raises: TrackerError."""
    if not isinstance(project, str) or not project:
        raise TrackerError(
            f"init_trackers({project!r:.60}) got an invalid project name; pass a non-empty string, such as 'my-project'."
        )


def check_options(name: str, options: Any) -> None:
    """Raise unless `options` are mappings by tracker. Raises: ArgumentError."""
    if options is not None and not (
        isinstance(options, Mapping)
        and all(
            isinstance(tracker_options, Mapping) for tracker_options in options.values()
        )
    ):
        raise ArgumentError(
            f"{name}={options!r:.60} does not assign options to trackers; write for example {name}={{'wandb': {{'entity': 'us'}}}}."
        )


def snapshot(name: str, value: Any) -> Scalar | Deferred:
    """Return the value to log, safe against later in-place changes, without synchronising with a device.

    Raises: TrackerError if the value is not one number or string.
    """
    if isinstance(value, (bool, int, float, str)):
        return value
    detach = getattr(value, "detach", None)
    if hasattr(type(value), "full_tensor"):
        raise TrackerError(
            f"{name!r} is a distributed tensor; reading it on the main process only would hang. "
            f"Log {name}.full_tensor(), called on every rank, instead."
        )
    if detach is not None:
        if value.numel() != 1:
            raise TrackerError(
                _not_scalar(name, f"a tensor of shape {tuple(value.shape)}")
            )
        if value.is_cpu:  # no device to wait for
            return _scalar(name, value.item())
        return Deferred(detach().clone())
    if hasattr(value, "item"):
        if getattr(value, "size", 1) != 1:
            raise TrackerError(_not_scalar(name, f"an array of shape {value.shape}"))
        return _scalar(name, value.item())
    return _scalar(name, value)


def _scalar(name: str, value: Any) -> Scalar:
    if isinstance(value, (bool, int, float, str)):
        return value
    raise TrackerError(_not_scalar(name, f"a {type(value).__name__}"))


def _not_scalar(name: str, value_words: str) -> str:
    return f"{name!r} is {value_words}; log takes single numbers and strings, so it was dropped. Reduce it first, e.g. by mean()."


def plain_config(config: Any) -> dict[str, Any]:
    """Return `config` (mapping, namespace, dataclass or None) as JSON values."""
    if config is None:
        return {}
    if isinstance(config, Namespace):
        config = vars(config)
    elif dataclasses.is_dataclass(config) and not isinstance(config, type):
        config = dataclasses.asdict(config)
    if not isinstance(config, Mapping):
        raise TrackerError(
            f"the config of a run is a {type(config).__name__}; trackers keep it as named values. "
            "Give a dict, an argparse.Namespace or a dataclass."
        )
    return {str(key): _plain(value) for key, value in config.items()}


def _plain(value: Any) -> Any:
    match value:
        case None | bool() | int() | str():
            return value
        case float():
            return value if math.isfinite(value) else str(value)
        case Path():
            return str(value)
        case Mapping():
            return {str(key): _plain(inner) for key, inner in value.items()}
        case list() | tuple() | set() | frozenset():
            return [_plain(inner) for inner in value]
        case _ if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return _plain(dataclasses.asdict(value))
        case _:
            return str(value)


def plain_rows(
    name: str, columns: Sequence[str], data: Sequence[Sequence[Any]]
) -> list[list[Scalar | None]]:
    """Return the rows of a table as plain values. Raises: TrackerError unless a row has one cell per column."""
    rows = [[plain_cell(value) for value in row] for row in data]
    for row in rows:
        if len(row) != len(columns):
            raise TrackerError(
                f"the table {name!r} has {len(columns)} columns and a row of {len(row)} cells, so cells cannot be assigned to columns. "
                "Give every row one cell per column."
            )
    return rows


def plain_cell(value: Any) -> Scalar | None:
    """Return one cell of a table as a plain value."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if hasattr(value, "item") and not hasattr(value, "full_tensor"):
        item = value.item()
        return item if isinstance(item, (bool, int, float, str)) else str(item)
    return str(value)


_CHANNELS = (1, 3, 4)


def as_pixels(name: str, value: Any) -> list[Pixels]:
    """Return the images in `value` as height x width x channels arrays of bytes.

    Accepts an array, tensor or PIL image, or a list of them: one image (H,W), (H,W,C) or (C,H,W), or a batch of such.
    Floats are read as 0..1, integers as 0..255.
    Raises: TrackerError for other shapes.
    """
    if isinstance(value, (list, tuple)):
        return [image for item in value for image in as_pixels(name, item)]
    array = np.asarray(
        value.detach().float().cpu() if hasattr(value, "detach") else value
    )
    if hasattr(value, "detach") and not value.dtype.is_floating_point:
        array = array.astype(np.uint8)
    if array.ndim == 2:
        array = array[None, :, :, None]
    elif array.ndim == 3:
        array = array[None]
    if (
        array.ndim == 4
        and array.shape[3] not in _CHANNELS
        and array.shape[1] in _CHANNELS
    ):
        array = array.transpose(0, 2, 3, 1)
    if array.ndim != 4 or array.shape[3] not in _CHANNELS:
        raise TrackerError(
            f"{name!r} has the shape {tuple(np.shape(array))}, which is not an image; it was dropped. "
            "Give (H,W), (H,W,C), (C,H,W) or a batch of these, with 1, 3 or 4 channels."
        )
    if array.dtype.kind == "f":
        array = np.nan_to_num(array).clip(0.0, 1.0) * 255.0 + 0.5
    elif array.dtype.kind == "b":
        array = array.astype(np.uint8) * 255
    return list(array.clip(0, 255).astype(np.uint8))


def png(image: Pixels) -> bytes:
    """Return `image` as the bytes of a PNG file."""
    height, width, channels = image.shape
    color = {1: 0, 3: 2, 4: 6}[channels]
    rows = np.concatenate(
        [np.zeros((height, 1), np.uint8), image.reshape(height, -1)], axis=1
    )
    header = struct.pack(">IIBBBBB", width, height, 8, color, 0, 0, 0)
    chunks = (
        (b"IHDR", header),
        (b"IDAT", zlib.compress(rows.tobytes(), 6)),
        (b"IEND", b""),
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, body) for kind, body in chunks)


def _chunk(kind: bytes, body: bytes) -> bytes:
    return (
        struct.pack(">I", len(body))
        + kind
        + body
        + struct.pack(">I", zlib.crc32(kind + body))
    )
