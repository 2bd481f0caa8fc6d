"""Worker processes and readers: dataset wrappers, and separate random states that a resume restores."""

from __future__ import annotations

import base64
import ctypes
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hasten.data.batch_plan import derive_seed
from hasten.errors import DataError

# Any in this file: states of three libraries, in three formats.
_PYTHON_WORDS: Final = 625
_NUMPY_BYTES: Final = 624 * 4 + 4  # numpy's MT19937: its words, then its index among them


class NumpyState(NamedTuple):
    """The state of numpy's global generator: its memory, and the cached normal number."""

    raw: bytes
    has_gauss: int = 0
    gauss: float = 0.0

    def tuple_(self) -> tuple[Any, ...]:
        """Return the state as `np.random.set_state` expects it."""
        key = np.frombuffer(self.raw[:-4], dtype=np.uint32).copy()
        return "MT19937", key, int.from_bytes(self.raw[-4:], "little"), self.has_gauss, self.gauss


class States(NamedTuple):
    """The CPU random states of a process."""

    torch: Tensor
    python: tuple[Any, ...]
    numpy: NumpyState

    def same(self, other: States) -> bool:
        """Return True if nothing was drawn between the two."""
        return self.numpy == other.numpy and self.python == other.python and torch.equal(self.torch, other.torch)


@dataclass(eq=False)
class RandomStates:
    """Reader, writer and seeder of the CPU random states of this process.

    numpy takes about 100 us to read or to write its state, more than reading most batches takes. The memory of its
    generator is copied instead unless a normal number is cached, which the object knows of states it wrote.
    """

    _last: NumpyState | None = None
    _address: int = 0

    def __getstate__(self) -> dict[str, Any]:
        return {"_last": None, "_address": 0}  # addresses are invalid in another process

    def read(self) -> States:
        """Return the current states."""
        return States(torch.get_rng_state(), random.getstate(), self._read_numpy())

    def write(self, states: States) -> None:
        """Set the states."""
        torch.set_rng_state(states.torch)
        random.setstate(states.python)
        address = self._find()
        last = self._last
        if address and last and not last.has_gauss and not states.numpy.has_gauss and self._raw(address) == last.raw:
            ctypes.memmove(address, states.numpy.raw, _NUMPY_BYTES)
        else:
            np.random.set_state(states.numpy.tuple_())
        self._last = states.numpy

    def seed(self, seed: int) -> None:
        """Seed all three generators."""
        seed_everything(seed)
        address = self._find()
        self._last = NumpyState(self._raw(address)) if address else None

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Context manager that restores the states on exit."""
        outside = self.read()
        try:
            yield
        finally:
            self.write(outside)

    def _read_numpy(self) -> NumpyState:
        address = self._find()
        last = self._last
        if address and last and not last.has_gauss and self._raw(address) == last.raw:
            return last
        state: Any = np.random.get_state()
        if state[0] != "MT19937":
            raise DataError(
                f"numpy's global generator is a {state[0]}, whose state hasten does not save, so data could not be reproduced on "
                "resume. Use np.random's default MT19937, or draw from a separate Generator."
            )
        raw = np.asarray(state[1], dtype=np.uint32).tobytes() + int(state[2]).to_bytes(4, "little")
        self._last = NumpyState(raw, int(state[3]), float(state[4]))
        return self._last

    def _find(self) -> int:
        """Return the address of numpy's generator state; 0 if its layout is not as expected."""
        bits: Any = np.random.get_bit_generator()  # type: ignore[attr-defined] # public, and missing in numpy's stubs
        if type(bits) is not np.random.MT19937:
            return 0
        address = int(bits.ctypes.state_address)
        if address != self._address:
            state = bits.state["state"]
            expected = state["key"].astype(np.uint32).tobytes() + int(state["pos"]).to_bytes(4, "little")
            if self._raw(address) != expected:
                return 0
            self._address = address
        return address

    @staticmethod
    def _raw(address: int) -> bytes:
        return ctypes.string_at(address, _NUMPY_BYTES)


class OwnRng:
    """Random states of one reader. They start from a seed, and continue from the end of the last `entered` block."""

    def __init__(self, seed: int, process: RandomStates) -> None:
        self._seed = seed
        self._process = process
        self._states: States | None = None
        self._drawn = False

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Context manager that draws from these states, without restoring the previous ones (see RandomStates.kept)."""
        if self._states is None:
            self._process.seed(self._seed)
            self._states = self._process.read()
        else:
            self._process.write(self._states)
        try:
            yield
        finally:
            states = self._process.read()
            self._drawn = self._drawn or not states.same(self._states)
            self._states = states

    def state(self) -> States | None:
        """Return the states; None while nothing was drawn."""
        return self._states if self._drawn else None

    def place(self, states: States | None) -> None:
        """Continue from a value that `state` returned."""
        self._states, self._drawn = states, states is not None


def seed_everything(seed: int) -> None:
    """Seed the CPU random states that datasets draw from."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)


def encode_states(states: States) -> dict[str, Any]:
    """Return the states as JSON values."""
    version, words, gauss = states.python
    return {
        "torch": _text(bytes(states.torch.numpy())),
        "python": [version, _text(np.array(words, dtype=np.uint32).tobytes()), gauss],
        "numpy": [_text(states.numpy.raw), states.numpy.has_gauss, states.numpy.gauss],
    }


def decode_states(saved: Mapping[str, Any]) -> States:
    """Return the states that `encode_states` wrote, after testing them on unused generators. Raises: DataError."""
    try:
        version, words, gauss = saved["python"]
        numbers = np.frombuffer(base64.b64decode(words), dtype=np.uint32)
        if len(numbers) != _PYTHON_WORDS:
            raise ValueError(f"{len(numbers)} words instead of {_PYTHON_WORDS}")
        python = (version, tuple(numbers.tolist()), gauss)
        random.Random().setstate(python)
        raw, has_gauss, cached = saved["numpy"]
        numpy = NumpyState(base64.b64decode(raw), int(has_gauss), float(cached))
        if len(numpy.raw) != _NUMPY_BYTES:
            raise ValueError(f"{len(numpy.raw)} bytes instead of {_NUMPY_BYTES}")
        np.random.RandomState().set_state(numpy.tuple_())
        state = torch.from_numpy(np.frombuffer(base64.b64decode(saved["torch"]), dtype=np.uint8).copy())
        torch.Generator().set_state(state)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise DataError(
            f"the loader's state holds random states that cannot be read ({error}), so data would be drawn differently. "
            f"Use another checkpoint, or start a new epoch."
        ) from error
    return States(state, python, numpy)


def _text(raw: bytes) -> str:
    return base64.b64encode(raw).decode()


# Any in this file: indices, samples and attributes are objects of the user.


class Forwarding:
    """Proxy of the user's dataset: attributes it does not define are read from and written to that dataset.

    So `get_worker_info().dataset` works in a worker_init_fn as the dataset itself would. Its attributes start with
    `hasten_`, to avoid name clashes.
    """

    hasten_dataset: Any

    def __getattr__(self, name: str) -> Any:
        if name.startswith(("__", "hasten_")):
            raise AttributeError(name)
        return getattr(self.hasten_dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("hasten_"):
            object.__setattr__(self, name, value)
        else:
            setattr(self.hasten_dataset, name, value)


Picked = tuple[list[Any], int]
"""A batch of indices, and the seed for drawing its samples. A plain tuple: one is pickled for every batch."""


class WorkerDataset(Forwarding):
    """The user's dataset in a worker. Each batch starts from random states that depend on its position in the epoch.

    So a resumed run augments its batches as the uninterrupted one would have, regardless of earlier work.
    """

    def __init__(self, dataset: Any) -> None:
        self.hasten_dataset = dataset

    def __len__(self) -> int:
        return len(self.hasten_dataset)

    def __getitems__(self, picked: Picked) -> Any:
        indices, seed = picked
        seed_everything(seed)
        fetch = getattr(self.hasten_dataset, "__getitems__", None)
        return fetch(indices) if fetch else [_sample(self.hasten_dataset, index) for index in indices]

    def __getitem__(self, picked: Picked) -> Any:
        (index,), seed = picked
        seed_everything(seed)
        return _sample(self.hasten_dataset, index)


def _sample(dataset: Any, index: Any) -> Any:
    try:
        return dataset[index]
    except Exception as error:  # of the user's dataset: any type, re-raised unchanged
        error.add_note(f"hasten: raised by the dataset at index {index!r}.")
        raise


def seed_of_batch(seed: int, epoch: int, shard: int, number: int) -> int:
    """Return the seed of batch `number` of an epoch on one rank."""
    return derive_seed(seed, epoch, shard, number, 2)
