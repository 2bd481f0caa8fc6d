"""Conversion of logged values to plain ones; tensors stay on their device until a flush."""

from __future__ import annotations

import dataclasses
import math
import struct
import zlib
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import starmap
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


def flatten_values(
    values: Mapping[str, Any], prefix: str = ""
) -> Iterator[tuple[str, Any]]:
    """Yield every value with its path, joined by slashes."""
    for key, logged_value in values.items():
        value_name = key if not prefix and type(key) is str else f"{prefix}{key}"
        if type(logged_value) not in (float, int) and isinstance(logged_value, Mapping):
            yield from flatten_values(logged_value, f"{value_name}/")
        else:
            yield value_name, logged_value


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


def check_options(value_name: str, options: Any) -> None:
    """Raise unless `options` are mappings by tracker. Raises: ArgumentError."""
    if options is not None and not (
        isinstance(options, Mapping)
        and all(
            isinstance(tracker_options, Mapping) for tracker_options in options.values()
        )
    ):
        raise ArgumentError(
            f"{value_name}={options!r:.60} does not assign options to trackers; write for example {value_name}={{'wandb': {{'entity': 'us'}}}}."
        )


def snapshot_value(value_name: str, logged_value: Any) -> Scalar | Deferred:
    """Return the value to log, safe against later in-place changes, without synchronising with a device.

    Raises: TrackerError if the value is not one number or string.
    """
    if isinstance(logged_value, (bool, int, float, str)):
        return logged_value
    detach = getattr(logged_value, "detach", None)
    if hasattr(type(logged_value), "full_tensor"):
        raise TrackerError(
            f"{value_name!r} is a distributed tensor; reading it on the main process only would hang. "
            f"Log {value_name}.full_tensor(), called on every rank, instead."
        )
    if detach is not None:
        if logged_value.numel() != 1:
            raise TrackerError(
                _not_scalar(
                    value_name, f"a tensor of shape {tuple(logged_value.shape)}"
                )
            )
        if logged_value.is_cpu:  # no device to wait for
            return _checked_scalar(value_name, logged_value.item())
        return Deferred(detach().clone())
    if hasattr(logged_value, "item"):
        if getattr(logged_value, "size", 1) != 1:
            raise TrackerError(
                _not_scalar(value_name, f"an array of shape {logged_value.shape}")
            )
        return _checked_scalar(value_name, logged_value.item())
    return _checked_scalar(value_name, logged_value)


def _checked_scalar(value_name: str, logged_value: Any) -> Scalar:
    if isinstance(logged_value, (bool, int, float, str)):
        return logged_value
    raise TrackerError(_not_scalar(value_name, f"a {type(logged_value).__name__}"))


def _not_scalar(value_name: str, value_words: str) -> str:
    return f"{value_name!r} is {value_words}; log takes single numbers and strings, so it was dropped. Reduce it first, e.g. by mean()."


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
    return {str(key): _plain_json(logged_value) for key, logged_value in config.items()}


def _plain_json(logged_value: Any) -> Any:
    match logged_value:
        case None | bool() | int() | str():
            return logged_value
        case float():
            return logged_value if math.isfinite(logged_value) else str(logged_value)
        case Path():
            return str(logged_value)
        case Mapping():
            return {str(key): _plain_json(inner) for key, inner in logged_value.items()}
        case list() | tuple() | set() | frozenset():
            return list(map(_plain_json, logged_value))
        case _ if dataclasses.is_dataclass(logged_value) and not isinstance(
            logged_value, type
        ):
            return _plain_json(dataclasses.asdict(logged_value))
        case _:
            return str(logged_value)


def plain_rows(
    value_name: str, columns: Sequence[str], data: Sequence[Sequence[Any]]
) -> list[list[Scalar | None]]:
    """Return the rows of a table as plain values. Raises: TrackerError unless a row has one cell per column."""
    rows = [list(map(plain_cell, row)) for row in data]
    for row in rows:
        if len(row) != len(columns):
            raise TrackerError(
                f"the table {value_name!r} has {len(columns)} columns and a row of {len(row)} cells, so cells cannot be assigned to columns. "
                "Give every row one cell per column."
            )
    return rows


def plain_cell(logged_value: Any) -> Scalar | None:
    """Return one cell of a table as a plain value."""
    if logged_value is None or isinstance(logged_value, (bool, int, float, str)):
        return logged_value
    if hasattr(logged_value, "item") and not hasattr(logged_value, "full_tensor"):
        array_item = logged_value.item()
        if isinstance(array_item, (bool, int, float, str)):
            return array_item
        return str(array_item)
    return str(logged_value)


_CHANNELS = (1, 3, 4)


def as_pixels(value_name: str, logged_value: Any) -> list[Pixels]:
    """Return the images in `value` as height x width x channels arrays of bytes.

    Accepts an array, tensor or PIL image, or a list of them: one image (H,W), (H,W,C) or (C,H,W), or a batch of such.
    Floats are read as 0..1, integers as 0..255.
    Raises: TrackerError for other shapes.
    """
    if isinstance(logged_value, (list, tuple)):
        images = []
        for array_item in logged_value:
            images += as_pixels(value_name, array_item)
        return images
    if hasattr(logged_value, "detach"):
        logged_value = logged_value.detach().float().cpu()
    array = np.asarray(logged_value)
    if hasattr(logged_value, "detach") and not logged_value.dtype.is_floating_point:
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
            f"{value_name!r} has the shape {tuple(np.shape(array))}, which is not an image; it was dropped. "
            "Give (H,W), (H,W,C), (C,H,W) or a batch of these, with 1, 3 or 4 channels."
        )
    if array.dtype.kind == "f":
        array = np.nan_to_num(array).clip(0.0, 1.0) * 255.0 + 0.5
    elif array.dtype.kind == "b":
        array = array.astype(np.uint8) * 255
    return list(array.clip(0, 255).astype(np.uint8))


def encode_png(image: Pixels) -> bytes:
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
    return b"\x89PNG\r\n\x1a\n" + b"".join(starmap(_png_chunk, chunks))


def _png_chunk(kind: bytes, body: bytes) -> bytes:
    return (
        struct.pack(">I", len(body))
        + kind
        + body
        + struct.pack(">I", zlib.crc32(kind + body))
    )
