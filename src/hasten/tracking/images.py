"""Bring whatever users call an image into one form, and write it as PNG without any package."""

from __future__ import annotations

import struct
import zlib
from typing import Any

import numpy as np

from hasten.errors import TrackerError
from hasten.tracking.base import Pixels

_CHANNELS = (1, 3, 4)


def as_pixels(name: str, value: Any) -> list[Pixels]:
    """The images in `value` as height x width x channels arrays of bytes.

    Takes an array, tensor or PIL image, or a list of them: one image (H,W), (H,W,C) or (C,H,W), or a batch of such.
    Floats are read as 0..1, integers as 0..255.
    Raises: TrackerError if the shape is none of these.
    """
    if isinstance(value, (list, tuple)):
        return [image for item in value for image in as_pixels(name, item)]
    array = np.asarray(value.detach().float().cpu() if hasattr(value, "detach") else value)
    if hasattr(value, "detach") and not value.dtype.is_floating_point:
        array = array.astype(np.uint8)
    if array.ndim == 2:
        array = array[None, :, :, None]
    elif array.ndim == 3:
        array = array[None]
    if array.ndim == 4 and array.shape[3] not in _CHANNELS and array.shape[1] in _CHANNELS:
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
    """`image` as the bytes of a PNG file."""
    height, width, channels = image.shape
    color = {1: 0, 3: 2, 4: 6}[channels]
    rows = np.concatenate([np.zeros((height, 1), np.uint8), image.reshape(height, -1)], axis=1)
    header = struct.pack(">IIBBBBB", width, height, 8, color, 0, 0, 0)
    parts = ((b"IHDR", header), (b"IDAT", zlib.compress(rows.tobytes(), 6)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, body) for kind, body in parts)


def _chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
