"""Encoding of the objects that ranks exchange: pickle, as with the original, which unpickles whatever its peers send."""

from __future__ import annotations

import pickle
from typing import Any, Final

import cloudpickle

from hasten.comm.encoding import Codec
from hasten.errors import CommError

_FAULTS: Final = (
    pickle.PicklingError,
    TypeError,
    ValueError,
    AttributeError,
    RecursionError,
    RuntimeError,
)


def _encode_pickle(value: Any) -> bytes:  # Any: the caller's objects
    try:
        try:
            return pickle.dumps(value, protocol=5)
        # classes of notebooks and functions go by value
        except (pickle.PicklingError, AttributeError, TypeError):
            return bytes(cloudpickle.dumps(value))
    except _FAULTS as error:
        raise CommError(
            f"a {type(value).__qualname__} cannot be sent to other ranks: {error}. Send what it is made of: numbers, text, lists, dicts, "
            "tensors."
        ) from error


PICKLE: Final = Codec(_encode_pickle, pickle.loads)
