"""Comparison of what ranks read: their first samples, and the indices that their samplers draw."""

from __future__ import annotations

import math
import operator
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from itertools import islice, repeat
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from hasten.comm.base import Comm
from hasten.data.carried_state import CarriedState
from hasten.data.random_states import OwnRng, RandomStates, States, decode_states
from hasten.errors import DataError

# Any in this file: the user's samples and samplers.
NUM_SAMPLES: Final = 4
NUM_UNITS: Final = 64
_MAX_UNITS: Final = 1_000_000
_MAX_LEAVES: Final = 200
_MAX_ITEMS: Final = 64
_NUM_VALUES: Final = 16

Leaf = list[Any]
"""A value of a sample: text with its type and checksum, and for real numbers some of them, which may differ by rounding."""
Sample = dict[str, Leaf]
"""The leaves of a sample by their paths."""


def different_data(difference: str, num_ranks: int) -> DataError:
    """Return the error for ranks that were given different data without `already_sharded`."""
    return DataError(
        f"the ranks were given different data: {difference}. prepare() splits a loader, so each rank would read 1/{num_ranks} of its "
        "data and the rest would be lost. Give every rank the same dataset and sampler: call set_seed(0) before random data is made or "
        "split. If the loader of each rank holds its part of the data on purpose, set DataLoaderConfiguration(already_sharded=True), or "
        "call prepare_data_loader(loader, already_sharded=True). already_sharded=False leaves this check out."
    )


# -- samples ----------------------------------------------------------------------------------------------------------
def leaves_of(sample: Any) -> Sample:
    """Return the values of a sample by path; objects of unknown classes are left out."""
    leaves: Sample = {}
    waiting = [("", sample)]
    while waiting and len(leaves) < _MAX_LEAVES:
        path, value = waiting.pop(0)
        if isinstance(value, Mapping):
            waiting += [(f"{path}.{key}", item) for key, item in islice(value.items(), _MAX_ITEMS)]
        elif isinstance(value, list | tuple):
            leaves[f"{path}.len"] = [str(len(value))]
            waiting += [(f"{path}.{number}", item) for number, item in enumerate(value[:_MAX_ITEMS])]
        elif is_dataclass(value) and not isinstance(value, type):
            waiting += [(f"{path}.{field.name}", getattr(value, field.name)) for field in fields(value)]
        elif (leaf := _leaf(value)) is not None:
            leaves[path] = leaf
    return leaves


def _leaf(value: Any) -> Leaf | None:
    if value is None or isinstance(value, bool | int | str | bytes):
        return [f"{type(value).__name__} {zlib.crc32(repr(value).encode())}"]
    if isinstance(value, float):
        return ["float", value]
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biuf":
        is_wide = value.dtype.kind == "u" and value.dtype.itemsize > 1  # torch cannot index these
        value = torch.as_tensor(np.ascontiguousarray(value, dtype=np.int64 if is_wide else None))
    if not isinstance(value, Tensor) or value.layout != torch.strided or value.device.type == "meta":
        return None
    numbers = value.detach().reshape(-1).cpu()
    places = torch.linspace(0, max(numbers.numel() - 1, 0), min(_NUM_VALUES, numbers.numel())).round().long()
    values = numbers[places].tolist()
    if value.is_floating_point() or value.dtype == torch.uint8:  # images are subject to rounding
        mean = float(numbers.double().mean()) if values else 0.0
        return [f"real {tuple(value.shape)}", mean, *values]
    return [f"exact {tuple(value.shape)} {zlib.crc32(repr(values).encode())}"]


def _alike(leaf: Leaf, other: Leaf) -> bool:
    if leaf[0] != other[0] or len(leaf) != len(other):
        return False
    return all(
        math.isclose(number, second, rel_tol=2e-2, abs_tol=1e-6) or (math.isnan(number) and math.isnan(second))
        for number, second in zip(leaf[1:], other[1:], strict=True)
    )


def checksum_of(samples: Sequence[Sample]) -> int:
    """Return a checksum of the values of samples."""
    return zlib.crc32(repr([sorted(sample.items()) for sample in samples]).encode())


def samples_differ(reads: Sequence[Sequence[list[Sample]] | None]) -> bool:
    """Return True if the first samples of ranks come from different data; each rank has read its samples three times.

    Values that one rank does not reproduce from equal random states are ignored. A value that is equal on all ranks,
    also under other random states, and differs between samples identifies the sample: then the rest is augmentation.
    """
    turns = [read for read in reads if read is not None]
    if len(turns) < len(reads):
        return False
    count = min(len(samples) for turn in turns for samples in turn)
    if not count:
        return False
    first, again, reseeded = ([turn[number][:count] for turn in turns] for number in range(3))
    paths = {path for samples in first for sample in samples for path in sample}
    steady = [path for path in paths if all(map(_is_equal, first, again, repeat(path)))]
    equal = [path for path in steady if all(_is_equal(samples, first[0], path) for samples in first[1:])]
    fixed = [path for path in equal if all(map(_is_equal, first, reseeded, repeat(path)))]
    is_identified = any(len({tuple(sample[path]) for sample in first[0]}) == count for path in fixed)
    return len(equal) < len(steady) and not is_identified


def _is_equal(samples: list[Sample], others: list[Sample], path: str) -> bool:
    return all(
        path in sample and path in other and _alike(sample[path], other[path])
        for sample, other in zip(samples, others, strict=True)
    )


# -- indices that samplers draw ----------------------------------------------------------------------------------------
def plain_unit(unit: Any) -> Any:
    """Return a unit as numbers and texts. Raises: TypeError for other types."""
    if isinstance(unit, str):
        return str(unit)
    if isinstance(unit, list | tuple):
        return [plain_unit(part) for part in unit]
    return operator.index(unit)


class DrawTrial:
    """Trial draw from this rank's sampler under the first rank's random states; the sampler's state is restored."""

    def __init__(
        self, sampler: Any, epoch: int, seed: int, start: dict[str, Any], keep: Callable[[], Callable[[], None]]
    ) -> None:
        self._sampler = sampler
        self._epoch = epoch
        self._seed = seed
        self._generators = start["generators"]
        self._states: States | None = None if start["process"] is None else decode_states(start["process"])
        self._keep = keep
        self._process = RandomStates()

    def units(self, count: int) -> list[Any] | None:
        """Return the first units; None if they cannot be drawn or compared."""
        put_back = self._keep()
        rng = OwnRng(self._seed, self._process)
        rng.place(self._states)
        try:
            with self._process.kept(), rng.entered():
                CarriedState(self._sampler, attributes=False).restore(self._generators)
                if hasattr(self._sampler, "set_epoch"):
                    self._sampler.set_epoch(self._epoch)
                return [plain_unit(unit) for unit in islice(iter(self._sampler), count)]
        except Exception:  # the user's sampler: the training loop raises its error when it draws
            return None
        finally:
            rng.close()
            put_back()

    def compare(self, first_units: list[list[Any] | None], comm: Comm) -> None:
        """Raise on every rank when the samplers of ranks yield different indices; the first ones of each rank are given.

        Samplers may order the same indices differently, since all ranks use the first rank's order. Ranks: every rank.
        """
        if None in first_units or all(units == first_units[0] for units in first_units):
            return
        checksum, repeated = (_checksum(self.units(_MAX_UNITS)) for _ in range(2))
        checksums = comm.all_gather_object(checksum if checksum == repeated else None)
        if None not in checksums and len(set(checksums)) > 1:
            raise different_data(f"{type(self._sampler).__name__} yields different indices on every rank", comm.size)


def _checksum(units: list[Any] | None) -> int | None:
    """Return a checksum of the set of indices."""
    if units is None:
        return None
    indices = {repr(index) for unit in units for index in (unit if isinstance(unit, list) else [unit])}
    return zlib.crc32(" ".join(sorted(indices)).encode())
