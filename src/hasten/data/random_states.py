"""Random states of the process that reads data: separate ones for each reader, which a resume restores."""

from __future__ import annotations

import base64
import ctypes
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hasten.errors import DataError

# Any in this file: states of three libraries, in three formats.
_PYTHON_WORDS: Final = 625
# numpy's MT19937: its words, then its index among them
_NUMPY_BYTES: Final = 624 * 4 + 4

NumpyState = dict[str, Any]
"""A state of np.random, as `np.random.get_state(legacy=False)` returns it."""


class States(NamedTuple):
    """The CPU random states of a process."""

    torch: Tensor
    python: tuple[Any, ...]
    numpy: NumpyState

    def same(self, earlier: States) -> bool:
        """Return True if nothing was drawn between the two, of which the second was read first."""
        # NumpyGenerator.read returns the same object while nothing is drawn
        return (
            self.numpy is earlier.numpy
            and self.python == earlier.python
            and torch.equal(self.torch, earlier.torch)
        )


class NumpyGenerator:
    """A bit generator for np.random's functions, exchanged by `np.random.set_bit_generator`.

    An exchange takes less than 1 us, whereas numpy takes about 60 us to read or to write the state of its MT19937, more
    than reading most batches takes. An exchange drops the second number of a pair of normal numbers, if it is cached. So
    the state is read after draws only, which are detected by comparing the generator's memory, and written only if it
    has such a number.
    """

    def __init__(self, bits: Any = None) -> None:
        self.bits: Any = np.random.MT19937(0) if bits is None else bits
        self._comparable = (
            isinstance(self.bits, np.random.MT19937) and _is_known_layout()
        )
        self._state: NumpyState | None = None
        self._memory: bytes | None = None
        """The generator's memory when its state was read; None if its size is unknown."""

    def install(self) -> None:
        """Make np.random's functions draw from this generator."""
        _install_bits(self.bits)
        if self._state is not None and self._state["has_gauss"]:
            np.random.set_state(self._state)

    def read(self) -> NumpyState:
        """Return the state of this generator, which is installed; the same object while nothing is drawn."""
        state = self._state
        memory = None
        if self._comparable:
            memory = _read_memory_of(self.bits)
        if (
            state is not None
            and memory is not None
            and memory == self._memory
            and not state["has_gauss"]
        ):
            return state
        self._state = np.random.get_state(legacy=False)
        self._memory = memory
        return self._state

    def forget(self) -> None:
        """Drop the state that was read: the generator will be seeded or written by others."""
        self._state = None

    def write(self, state: NumpyState) -> None:
        """Install this generator with a state."""
        _install_bits(self.bits)
        np.random.set_state(state)
        self._state = state
        if self._comparable:
            self._memory = _read_memory_of(self.bits)


def _read_memory_of(bits: np.random.MT19937) -> bytes:
    """Return the memory of the generator's state, which every draw changes."""
    return ctypes.string_at(bits.ctypes.state_address, _NUMPY_BYTES)


@cache  # a fact about the installed numpy
def _is_known_layout() -> bool:
    """Return True if the memory of an MT19937 is its words and its index; else states are read after every block."""
    bits = np.random.MT19937(0)
    bits.random_raw(3)
    return _read_memory_of(bits) == _pack_words_and_index(bits.state)


def _pack_words_and_index(state: Any) -> bytes:
    key_state = state["state"]
    return np.append(key_state["key"], key_state["pos"]).astype(np.uint32).tobytes()


def _install_bits(bits: Any) -> None:
    np.random.set_bit_generator(bits)  # type: ignore[attr-defined] # public, and missing in numpy's stubs


@dataclass(eq=False)
class RandomStates:
    """Reader and keeper of the CPU random states of this process."""

    _outside: NumpyGenerator | None = None
    _unused: list[NumpyGenerator] = field(default_factory=list)

    def __getstate__(self) -> dict[str, Any]:
        # generators of another process are not installed in this one
        return {"_outside": None, "_unused": []}

    def read(self) -> States:
        """Return the current states. Raises: DataError if np.random draws from a generator that cannot be saved."""
        numpy = self._find_installed().read()
        if (bits_name := numpy["bit_generator"]) != "MT19937":
            raise DataError(
                f"numpy's global generator is a {bits_name}, whose state hasten does not save, so data could not be reproduced on "
                "resume. Use np.random's default MT19937, or draw from a separate Generator."
            )
        return States(torch.get_rng_state(), random.getstate(), numpy)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Context manager that restores the states on exit. Inside, np.random has another generator: seed it first."""
        outside_generator = self._find_installed()
        outside_generator.read()
        torch_state = torch.get_rng_state()
        python_state = random.getstate()
        inside_generator = self.borrow()
        inside_generator.install()
        try:
            yield
        finally:
            torch.set_rng_state(torch_state)
            random.setstate(python_state)
            outside_generator.install()
            self.give_back(inside_generator)

    def borrow(self) -> NumpyGenerator:
        """Return a generator in any state; making one takes 0.2 ms, so that generators are reused."""
        if self._unused:
            return self._unused.pop()
        return NumpyGenerator()

    def give_back(self, generator: NumpyGenerator) -> None:
        """Make a generator that was borrowed available to others."""
        generator.forget()
        self._unused.append(generator)

    def _find_installed(self) -> NumpyGenerator:
        """Return the generator that np.random draws from now."""
        bits = np.random.get_bit_generator()  # type: ignore[attr-defined] # public, and missing in numpy's stubs
        if self._outside is None or self._outside.bits is not bits:
            self._outside = NumpyGenerator(bits)
        return self._outside


class OwnRng:
    """Random states of one reader. They start from a seed, and continue from the end of the last `entered` block."""

    def __init__(self, seed: int, process: RandomStates) -> None:
        self._seed = seed
        self._process = process
        self._numpy: NumpyGenerator | None = None
        self._states: States | None = None
        self._loaded = False
        self._drawn = False

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Context manager that draws from these states; only np.random's are restored on exit (see RandomStates.kept)."""
        outside_bits = np.random.get_bit_generator()  # type: ignore[attr-defined] # the same
        numpy_generator = self._numpy = (
            self._process.borrow() if self._numpy is None else self._numpy
        )
        if self._states is None:
            numpy_generator.install()
            seed_everything(self._seed)
            self._states = States(
                torch.get_rng_state(), random.getstate(), numpy_generator.read()
            )
        else:
            torch.set_rng_state(self._states.torch)
            random.setstate(self._states.python)
            if self._loaded:
                numpy_generator.write(self._states.numpy)
            else:
                numpy_generator.install()
            self._loaded = False
        try:
            yield
        finally:
            exit_states = States(
                torch.get_rng_state(), random.getstate(), numpy_generator.read()
            )
            self._drawn = self._drawn or not exit_states.same(self._states)
            self._states = exit_states
            _install_bits(outside_bits)

    def close(self) -> None:
        """Give numpy's generator back; the states are not entered again."""
        if self._numpy is not None:
            self._process.give_back(self._numpy)
            self._numpy = None

    def state(self) -> States | None:
        """Return the states; None while nothing was drawn."""
        return self._states if self._drawn else None

    def place(self, states: States | None) -> None:
        """Continue from a value that `state` returned."""
        self._states = states
        self._loaded = self._drawn = states is not None


def seed_everything(seed: int) -> None:
    """Seed the CPU random states that datasets draw from."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)


def encode_states(states: States) -> dict[str, Any]:
    """Return the states as JSON values."""
    version, python_words, gauss = states.python
    return {
        "torch": _encode_bytes(bytes(states.torch.numpy())),
        "python": [
            version,
            _encode_bytes(np.array(python_words, dtype=np.uint32).tobytes()),
            gauss,
        ],
        "numpy": [
            _encode_bytes(_pack_words_and_index(states.numpy)),
            states.numpy["has_gauss"],
            states.numpy["gauss"],
        ],
    }


def decode_states(saved: Mapping[str, Any]) -> States:
    """Return the states that `encode_states` wrote, after testing them on unused generators. Raises: DataError."""
    try:
        version, encoded_words, gauss = saved["python"]
        word_numbers = np.frombuffer(base64.b64decode(encoded_words), dtype=np.uint32)
        if len(word_numbers) != _PYTHON_WORDS:
            raise ValueError(f"{len(word_numbers)} words instead of {_PYTHON_WORDS}")
        python_state = (version, tuple(word_numbers.tolist()), gauss)
        random.Random().setstate(python_state)
        encoded_words_and_index, has_gauss, cached_normal = saved["numpy"]
        raw_bytes = base64.b64decode(encoded_words_and_index)
        if len(raw_bytes) != _NUMPY_BYTES:
            raise ValueError(f"{len(raw_bytes)} bytes instead of {_NUMPY_BYTES}")
        *key_words, word_index = np.frombuffer(raw_bytes, dtype=np.uint32).tolist()
        numpy_state = {
            "bit_generator": "MT19937",
            "state": {"key": np.array(key_words, dtype=np.uint32), "pos": word_index},
            "has_gauss": int(has_gauss),
            "gauss": float(cached_normal),
        }
        np.random.RandomState().set_state(numpy_state)
        torch_state = torch.from_numpy(
            np.frombuffer(base64.b64decode(saved["torch"]), dtype=np.uint8).copy()
        )
        torch.Generator().set_state(torch_state)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise DataError(
            f"the loader's state holds random states that cannot be read ({error}), so data would be drawn differently. "
            f"Use another checkpoint, or start a new epoch."
        ) from error
    return States(torch_state, python_state, numpy_state)


def _encode_bytes(raw_bytes: bytes) -> str:
    return base64.b64encode(raw_bytes).decode()
