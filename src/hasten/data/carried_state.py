"""State that a sampler or stream carries from one epoch to the next, found by inspection and stored as plain data.

A sampler may own a random generator, count its epochs, or shuffle a list in place. Without that state, a resumed
process would draw the first epoch's order again. Nothing here is pickled: generator states are numbers.
"""

from __future__ import annotations

import base64
import math
import random
from collections import deque
from collections.abc import Iterator, Mapping
from itertools import chain
from types import FunctionType, ModuleType
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset

from hasten import trees
from hasten.checkpoint.format.packing import pack, unpack
from hasten.errors import CheckpointError, DataError

# Any in this file: attributes of the user's objects.
# of one attribute; longer ones are data rather than state
_MAX_VALUES: Final = 100_000
_MAX_OBJECTS: Final = 2_000
_GENERATORS: Final = (
    torch.Generator,
    random.Random,
    np.random.Generator,
    np.random.RandomState,
    np.random.BitGenerator,
)
_FOREIGN: Final = (
    type,
    FunctionType,
    ModuleType,
    nn.Module,
    Tensor,
    np.ndarray,
    str,
    bytes,
)


class CarriedState:
    """The generators and changing attributes of one object of the user."""

    def __init__(self, owner: Any, attributes: bool = True) -> None:
        self._owner = owner
        self._attributes = attributes
        self._baseline = {
            path: packed for path, (_, _, packed) in self._plain_attributes().items()
        }

    def capture(self) -> dict[str, Any] | None:
        """Return the state as JSON values: generators, and attributes changed since prepare; None if there are none."""
        generators = {
            path: _read_generator(generator)
            for path, generator in self._generators().items()
        }
        changed_attributes = {
            path: packed
            for path, (_, _, packed) in self._plain_attributes().items()
            if path in self._baseline and packed != self._baseline[path]
        }
        state: dict[str, Any] = {"generators": generators} if generators else {}
        if changed_attributes:
            state["attributes"] = changed_attributes
        return state or None

    def restore(self, saved: Mapping[str, Any] | None) -> None:
        """Restore the state.

        Raises: DataError when the object lacks attributes that were saved, or has another kind of generator.
        """
        saved = saved or {}
        generators = self._generators()
        plain_attributes = self._plain_attributes()
        generator_states = saved.get("generators", {})
        saved_attributes = saved.get("attributes", {})
        lost_paths = [path for path in generator_states if path not in generators] + [
            path for path in saved_attributes if path not in plain_attributes
        ]
        if lost_paths:
            raise DataError(
                f"the loader's state holds {', '.join(lost_paths)} of a {type(self._owner).__name__}, but the current one has no such "
                "attribute, so its order would be different. Build it as in the saved run, or start a new epoch."
            )
        for path, state in generator_states.items():
            _write_generator(generators[path], state, path)
        for path, (owner, name, packed) in plain_attributes.items():
            saved_value = saved_attributes.get(path, self._baseline.get(path))
            if saved_value is not None and saved_value != packed:
                _assign_attribute(owner, name, decode_value(saved_value))

    def generators_changed(self, since: Mapping[str, Any] | None) -> bool:
        """Return True if any generator was drawn from since a capture."""
        current_states = {
            path: _read_generator(generator)
            for path, generator in self._generators().items()
        }
        return bool(current_states != (since or {}).get("generators", {}))

    def _generators(self) -> dict[str, Any]:
        return {
            path: attribute
            for path, attribute, _, _ in _walk_attributes(self._owner)
            if isinstance(attribute, _GENERATORS)
        }

    def _plain_attributes(self) -> dict[str, tuple[Any, str, Any]]:
        """Return path -> (owner, attribute, value as JSON) of plain attributes."""
        attributes: dict[str, tuple[Any, str, Any]] = {}
        if self._attributes:
            for path, attribute, owner, name in _walk_attributes(self._owner):
                if owner is not None and _num_values(attribute) <= _MAX_VALUES:
                    packed = encode_value(attribute)
                    if packed is not None:
                        attributes[path] = (owner, name, packed)
        return attributes


class SamplerState:
    """The state of a user's sampler: its `state_dict()` if it has a plain one, else what `CarriedState` finds."""

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler
        self._carried = CarriedState(sampler)

    def capture(self) -> dict[str, Any]:
        """Return the state as JSON values."""
        if hasattr(self._sampler, "state_dict") and hasattr(
            self._sampler, "load_state_dict"
        ):
            state = encode_value(self._sampler.state_dict())
            if state is not None:
                return {"state": state}
        return self._carried.capture() or {}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Restore a captured state."""
        if "state" in saved:
            self._sampler.load_state_dict(decode_value(saved["state"]))
        else:
            self._carried.restore(saved)


def _walk_attributes(root: Any) -> Iterator[tuple[str, Any, Any, str]]:
    """Yield (path, value, owner, attribute) of an object's content; the owner is None if assignment is impossible."""
    waiting_objects: deque[tuple[str, Any]] = deque([("", root)])
    seen_ids = {id(root)}
    while waiting_objects and len(seen_ids) < _MAX_OBJECTS:
        holder_path, holder = waiting_objects.popleft()
        for name, attribute, owner in _list_attributes(holder):
            path = f"{holder_path}.{name}" if holder_path else name
            yield path, attribute, owner, name
            if id(attribute) not in seen_ids and _may_hold_state(attribute):
                seen_ids.add(id(attribute))
                waiting_objects.append((path, attribute))


def _list_attributes(holder: Any) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(holder, list | tuple):
        yield from (
            (str(index), attribute, None) for index, attribute in enumerate(holder)
        )
    elif isinstance(holder, dict):
        yield from ((str(key), attribute, None) for key, attribute in holder.items())
    else:
        slot_names = [
            name for kind in type(holder).__mro__ for name in _slot_names(kind)
        ]
        for name in (*getattr(holder, "__dict__", {}), *slot_names):
            if hasattr(holder, name):
                yield name, getattr(holder, name), holder


def _slot_names(kind: type) -> tuple[str, ...]:
    slot_names = vars(kind).get("__slots__", ())
    if isinstance(slot_names, str):
        return (slot_names,)
    return tuple(name for name in slot_names if not name.startswith("__"))


def _may_hold_state(value: Any) -> bool:
    if isinstance(value, (*_FOREIGN, *_GENERATORS)):
        return False
    if isinstance(value, list | tuple | dict):
        return len(value) <= 64
    if not isinstance(value, IterableDataset) and (
        isinstance(value, Dataset) or _is_data(value)
    ):
        return False
    return hasattr(value, "__dict__") or any(
        _slot_names(kind) for kind in type(value).__mro__
    )


def _is_data(value: Any) -> bool:
    """Return True if a value is data to read rather than an object that reads it."""
    return hasattr(type(value), "__getitem__") and hasattr(type(value), "__len__")


def _num_values(value: Any) -> int:
    """Return the number of values in a container, counted up to the limit."""
    if isinstance(value, np.ndarray | Tensor):
        return math.prod(value.shape)
    if not isinstance(value, list | tuple | set | frozenset | deque | dict):
        return 1
    num_values = len(value)
    for item in chain(value, value.values() if isinstance(value, dict) else ()):
        if num_values > _MAX_VALUES:
            break
        num_values += _num_values(item)
    return num_values


def encode_value(value: Any) -> dict[str, Any] | None:
    """Return a plain value as JSON; None for other values."""
    try:
        packed_value, tensors = pack(value)
        arrays = {
            key: _encode_array(np.asarray(tensor)) for key, tensor in tensors.items()
        }
    # of a custom class, or a tensor that numpy does not have
    except (CheckpointError, TypeError, RuntimeError):
        return None
    return {"data": packed_value, "tensors": arrays}


def decode_value(saved: Any) -> Any:
    """Return the value that was given to `encode_value`."""
    return unpack(
        saved["data"],
        {
            key: torch.from_numpy(_decode_array(array))
            for key, array in saved["tensors"].items()
        },
    )


def _assign_attribute(owner: Any, name: str, value: Any) -> None:
    """Assign an attribute; lists, dicts and arrays are changed in place, since other objects may refer to them."""
    current_value = getattr(owner, name, None)
    if isinstance(current_value, list) and isinstance(value, list):
        current_value[:] = value
    elif isinstance(current_value, dict) and isinstance(value, dict):
        current_value.clear()
        current_value.update(value)
    elif (
        isinstance(current_value, np.ndarray)
        and isinstance(value, np.ndarray)
        and current_value.shape == value.shape
    ):
        current_value[...] = value
    else:
        object.__setattr__(owner, name, value)


# -- generators ---------------------------------------------------------------------------------------------------
def _read_generator(generator: Any) -> Any:
    """Return a generator's state as JSON values; None for that of the operating system, which has no state."""
    if isinstance(generator, torch.Generator):
        return encode_value(generator.get_state())
    if isinstance(generator, random.SystemRandom):
        return None
    if isinstance(generator, random.Random):
        return encode_value(generator.getstate())
    if isinstance(generator, np.random.RandomState):
        return encode_value(generator.get_state(legacy=False))
    state: Any = getattr(generator, "bit_generator", generator).state
    # its numbers have up to 128 bits, which JSON readers do not preserve
    return encode_value(
        trees.map_leaves(lambda x: hex(x) if type(x) is int else x, state)
    )


def _write_generator(generator: Any, saved_state: Any, path: str) -> None:
    if saved_state is None:
        return
    state = decode_value(saved_state)
    try:
        if isinstance(generator, torch.Generator):
            generator.set_state(state)
        elif isinstance(generator, random.Random):
            generator.setstate(state)
        elif isinstance(generator, np.random.RandomState):
            generator.set_state(state)
        else:
            bit_generator: Any = getattr(generator, "bit_generator", generator)
            bit_generator.state = trees.map_leaves(_parse_number, state)
    except (KeyError, TypeError, ValueError, RuntimeError, IndexError) as error:
        raise DataError(
            f"the saved state of the generator {path} does not fit a {type(generator).__name__} ({error}), so the order "
            f"would be another one. Use the same kind of generator as the saved run, or start a new epoch."
        ) from error


def _parse_number(leaf: Any) -> Any:
    if isinstance(leaf, str) and leaf.startswith("0x"):
        return int(leaf, 16)
    return leaf


def _encode_array(array: Any) -> list[Any]:
    return [
        str(array.dtype),
        list(array.shape),
        base64.b64encode(np.ascontiguousarray(array).tobytes()).decode(),
    ]


def _decode_array(saved: list[Any]) -> Any:
    dtype, shape, encoded_bytes = saved
    return (
        np.frombuffer(base64.b64decode(encoded_bytes), dtype=np.dtype(dtype))
        .reshape(shape)
        .copy()
    )
