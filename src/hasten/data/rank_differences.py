"""Detection of ranks with different data: by the content of dataset objects, first samples, and drawn indices."""

from __future__ import annotations

import functools
import math
import operator
import types
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from itertools import islice, repeat
from pathlib import PurePath
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from hasten.comm.base import Comm
from hasten.data.carried_state import CarriedState
from hasten.data.random_states import OwnRng, RandomStates, States, decode_states
from hasten.errors import DataError

# Any in this file: the user's datasets and samples.
NUM_SAMPLES: Final = 8
NUM_UNITS: Final = 64
_MOST_UNITS: Final = 1_000_000
_SKETCH: Final = 4096
_NUM_VALUES: Final = 16
_MOST_OBJECTS: Final = 200
_DEPTH: Final = 4
_RANK_WORDS: Final = frozenset({"RANK", "LOCAL_RANK", "WORLD_SIZE", "SLURM_PROCID"})
_RANK_CALLS: Final = frozenset({"get_rank", "get_world_size", "process_index", "num_processes", "local_process_index"})
_LIBRARIES: Final = ("torch", "builtins", "typing", "abc", "datasets", "numpy", "random", "collections")

Leaf = tuple[str, int] | tuple[str, str, tuple[float, ...]]
"""A value of a sample: exact values as (kind, checksum), real numbers as (kind, shape, some values)."""
Sample = dict[str, Leaf]


def different_data(what: str, num_ranks: int) -> DataError:
    """Return the error for ranks that were given different data without `already_sharded`."""
    return DataError(
        f"the ranks were given different data: {what}. prepare() splits a loader over the ranks, so each would read only 1/{num_ranks} "
        "of its data, and the rest would be lost. If the loader of each rank already contains its part of the data, set "
        "DataLoaderConfiguration(already_sharded=True) or call prepare_data_loader(loader, "
        f"already_sharded=True); otherwise give every rank the same dataset and sampler. If they are the same and only "
        f"look different, already_sharded=False leaves this check out."
    )


# -- content of dataset objects ---------------------------------------------------------------------------------------
def description(dataset: Any) -> dict[str, int]:
    """Return checksums of the dataset's attributes by path, without reading a sample. A difference is only a hint."""
    return {path: zlib.crc32(repr(_gist(value)).encode()) for path, value in _walk(dataset)}


def asks_for_rank(dataset: Any) -> bool:
    """Return True if code of the dataset's classes refers to the rank or the world size."""
    seen: set[int] = set()
    kinds = {
        kind for _, holder in _holders(dataset) for kind in type(holder).__mro__ if not _is_library(kind.__module__)
    }
    functions = [value for kind in kinds for value in vars(kind).values() if isinstance(value, types.FunctionType)]
    return any(_names_rank(function, seen) for function in functions)


def _names_rank(function: types.FunctionType, seen: set[int], depth: int = 3) -> bool:
    if id(function) in seen:
        return False
    seen.add(id(function))
    codes = [function.__code__]
    for code in codes:
        codes += [const for const in code.co_consts if isinstance(const, types.CodeType)]
        words = {const for const in code.co_consts if isinstance(const, str)}
        if words & _RANK_WORDS or _RANK_CALLS & set(code.co_names):
            return True
    called = [function.__globals__.get(name) for code in codes for name in code.co_names] if depth else []
    return any(
        _names_rank(one, seen, depth - 1)
        for one in called
        if isinstance(one, types.FunctionType) and not _is_library(one.__module__ or "")
    )


def _is_library(module: str) -> bool:
    return module.split(".")[0] in _LIBRARIES


def _walk(dataset: Any) -> Iterator[tuple[str, Any]]:
    for path, holder in _holders(dataset):
        yield path, holder
        for name, value in _attributes(holder):
            yield f"{path}.{name}", value


def _holders(dataset: Any) -> Iterator[tuple[str, Any]]:
    """Yield the dataset and the objects that it refers to, including nested datasets."""
    waiting: list[tuple[str, Any, int]] = [("dataset", dataset, _DEPTH)]
    seen = {id(dataset)}
    while waiting and len(seen) <= _MOST_OBJECTS:
        path, holder, depth = waiting.pop(0)
        yield path, holder
        inner = _attributes(holder) if depth else []
        for name, value in inner:
            listed = isinstance(value, list | tuple) and len(value) <= _NUM_VALUES
            for number, one in enumerate(value if listed else [value]):
                if id(one) not in seen and _is_holder(one):
                    seen.add(id(one))
                    waiting.append((f"{path}.{name}[{number}]" if listed else f"{path}.{name}", one, depth - 1))


def _attributes(holder: Any) -> list[tuple[str, Any]]:
    """Return an object's attributes and slots, and the outer variables that the methods of its class read."""
    found = list(vars(holder).items()) if hasattr(holder, "__dict__") else []
    for kind in type(holder).__mro__:
        if _is_library(kind.__module__):
            continue
        slots = kind.__dict__.get("__slots__", ())
        names = (slots,) if isinstance(slots, str) else tuple(slots)
        found += [(name, getattr(holder, name)) for name in names if hasattr(holder, name)]
        functions = [value for value in vars(kind).values() if isinstance(value, types.FunctionType)]
        found += [outer for function in functions for outer in _outer_variables(function)]
    lambdas = [value for _, value in found if isinstance(value, types.FunctionType)]
    return found + [outer for function in lambdas for outer in _outer_variables(function)]


def _outer_variables(function: types.FunctionType) -> list[tuple[str, Any]]:
    """Return the variables of enclosing functions and of the module that a function reads; no modules, classes, functions."""
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    found = [(name, cell.cell_contents) for name, cell in cells if name != "__class__" and not _is_empty(cell)]
    module = function.__globals__
    found += [(name, module[name]) for name in function.__code__.co_names if name in module]
    code = type | types.ModuleType | types.FunctionType | types.BuiltinFunctionType
    return [(f"{function.__name__}:{name}", value) for name, value in found if not isinstance(value, code)]


def _is_empty(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018  # reading is the only way to ask
    except ValueError:  # a variable that is not assigned yet
        return True
    return False


def _is_holder(value: Any) -> bool:
    if isinstance(value, type | types.ModuleType | types.FunctionType | torch.nn.Module | Tensor | np.ndarray):
        return False
    return isinstance(value, Dataset) or (hasattr(value, "__dict__") and not _is_library(type(value).__module__))


def _gist(value: Any, depth: int = 2) -> Any:
    """Return an excerpt of a value without addresses: equal for equal data on every rank."""
    if value is None or isinstance(value, bool | int | float | complex | str | bytes | range | slice | PurePath):
        return value
    if isinstance(value, Tensor):
        return ("tensor", tuple(value.shape), _some(value.detach()) if value.device.type == "cpu" else ())
    if isinstance(value, np.ndarray | np.generic):
        return ("array", value.shape, _some(torch.from_numpy(_picked(value))) if value.dtype.kind in "biuf" else ())
    if isinstance(value, functools.partial):
        return _gist(value.args, depth)
    if isinstance(value, list | tuple) and depth:
        plain = value if type(value) in (list, tuple) else list(value)  # subclasses may index in another way
        return (len(value), [_gist(plain[place], depth - 1) for place in _places(len(value))])
    if isinstance(value, dict) and depth:
        return (len(value), [(str(key), _gist(one, depth - 1)) for key, one in islice(value.items(), _NUM_VALUES)])
    return type(value).__qualname__


def _places(length: int) -> list[int]:
    return sorted({round(number * (length - 1) / (_NUM_VALUES - 1)) for number in range(_NUM_VALUES)}) if length else []


def _picked(array: Any) -> Any:
    flat = np.asarray(array).reshape(-1)
    return flat[_places(flat.size)].copy()


def _some(values: Tensor) -> tuple[Any, ...]:
    if values.layout != torch.strided:
        return ()
    flat = values.reshape(-1)
    return tuple(flat[_places(flat.numel())].tolist())


# -- content of first samples -----------------------------------------------------------------------------------------
def leaves_of(sample: Any) -> Sample:
    """Return a sample's values by path: checksums of numbers and texts, some values where rounding may differ."""
    found: Sample = {}
    waiting = [("", sample)]
    while waiting and len(found) < _MOST_OBJECTS:
        path, value = waiting.pop(0)
        if isinstance(value, Mapping):
            waiting += [(f"{path}.{key}", one) for key, one in islice(value.items(), 64)]
        elif isinstance(value, list | tuple) and len(value) <= 64:
            waiting += [(f"{path}.{number}", one) for number, one in enumerate(value)]
        elif is_dataclass(value) and not isinstance(value, type):
            waiting += [(f"{path}.{field.name}", getattr(value, field.name)) for field in fields(value)]
        elif (leaf := _leaf(value)) is not None:
            found[path] = leaf
    return found


def _leaf(value: Any) -> Leaf | None:
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biuf":
        value = torch.as_tensor(np.asarray(value))
    if isinstance(value, float):
        return ("real", "", (value,))
    if value is None or isinstance(value, bool | int | str | bytes):
        return (type(value).__name__, zlib.crc32(repr(value).encode()))
    if isinstance(value, list | tuple):
        return ("list", zlib.crc32(repr(_gist(value)).encode()))
    if not isinstance(value, Tensor) or value.layout != torch.strided or value.device.type == "meta":
        return None  # an opaque object
    value = value.detach()
    if value.is_floating_point() or value.dtype == torch.uint8:  # images are subject to rounding
        numbers = value.double().cpu()
        mean = float(numbers.mean()) if numbers.numel() else 0.0
        return ("real", str(tuple(value.shape)), (mean, *_some(numbers)))
    return ("whole", zlib.crc32(repr((tuple(value.shape), _some(value.cpu()))).encode()))


def _alike(one: Leaf, other: Leaf) -> bool:
    if len(one) == 2 or len(other) == 2:
        return one == other
    if one[:2] != other[:2] or len(one[2]) != len(other[2]):
        return False
    return all(
        math.isclose(a, b, rel_tol=2e-2, abs_tol=1e-6) or (math.isnan(a) and math.isnan(b))
        for a, b in zip(one[2], other[2], strict=True)
    )


def samples_differ(reads: Sequence[Sequence[list[Sample]] | None]) -> bool:
    """Return True if the first samples of ranks come from different data; each rank has read its samples three times.

    Values that one rank does not reproduce from equal random states are ignored. A value that is equal on all ranks,
    also under other random states, and differs between samples identifies the sample: then the rest is augmentation.
    """
    if any(read is None for read in reads):
        return False
    turns = [read for read in reads if read is not None]
    count = min(len(samples) for turn in turns for samples in turn)
    if not count:
        return False
    first, again, other = ([turn[number][:count] for turn in turns] for number in range(3))
    paths = {path for samples in first for sample in samples for path in sample}
    steady = [path for path in paths if all(map(_is_steady, first, again, repeat(path)))]
    equal = [path for path in steady if all(_same(samples, first[0], path) for samples in first[1:])]
    fixed = [path for path in equal if all(map(_is_steady, first, other, repeat(path)))]
    names = any(len({sample[path] for sample in first[0]}) == count for path in fixed)
    return len(equal) < len(steady) and not names


def _is_steady(once: list[Sample], again: list[Sample], path: str) -> bool:
    return all(path in sample for sample in (*once, *again)) and _same(once, again, path)


def _same(samples: list[Sample], others: list[Sample], path: str) -> bool:
    return all(_alike(one[path], other[path]) for one, other in zip(samples, others, strict=True))


def decoded(samples: Any) -> list[Sample]:
    """Return samples as they were before sending, which may turn tuples into lists."""
    return [{path: _decoded(leaf) for path, leaf in sample.items()} for sample in samples]


def _decoded(leaf: Any) -> Leaf:
    return (leaf[0], leaf[1]) if len(leaf) == 2 else (leaf[0], leaf[1], tuple(leaf[2]))


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

    def units(self, most: int) -> list[Any] | None:
        """Return the first units; None if they cannot be drawn or compared."""
        put_back = self._keep()
        rng = OwnRng(self._seed, self._process)
        rng.place(self._states)
        try:
            with self._process.kept(), rng.entered():
                CarriedState(self._sampler, attributes=False).restore(self._generators)
                if hasattr(self._sampler, "set_epoch"):
                    self._sampler.set_epoch(self._epoch)
                return [plain_unit(unit) for unit in islice(iter(self._sampler), most)]
        except Exception:  # the user's sampler: the training loop raises its error when it draws
            return None
        finally:
            rng.close()
            put_back()

    def compare(self, gathered: list[list[Any] | None], comm: Comm) -> None:
        """Raise on every rank when the samplers of ranks yield different indices; `gathered` holds the first ones of each.

        Ranks: every rank.
        """
        if any(one is None or one != gathered[0] for one in gathered) and all(one is not None for one in gathered):
            once, again = self.units(_MOST_UNITS), self.units(_MOST_UNITS)
            steady = once is not None and again is not None and _sketch(once) == _sketch(again)
            sketches = comm.all_gather_object(_sketch(once) if steady and once is not None else None)
            if _are_different([None if one is None else (set(one[0]), one[1]) for one in sketches]):
                raise different_data(
                    f"{type(self._sampler).__name__} yields different indices on every rank", comm.size
                )


def _sketch(units: list[Any]) -> tuple[list[int], int]:
    """Return the smallest checksums of the indices, and the largest batch length, the most that `drop_last` omits."""
    batches = any(isinstance(unit, list) for unit in units)
    indices = {repr(one) for unit in units for one in (unit if isinstance(unit, list) else [unit])}
    smallest = sorted(zlib.crc32(index.encode()) for index in indices)[:_SKETCH]
    return smallest, max((len(unit) for unit in units if isinstance(unit, list)), default=0) if batches else 0


def _are_different(sketches: list[tuple[set[int], int] | None]) -> bool:
    """Return True if ranks have different indices; in one order, those that `drop_last` omits at its end may differ."""
    known = [one for one in sketches if one is not None]
    if len(known) < len(sketches):  # one draws from unknown randomness: the first rank's order is used
        return False
    first, slack = known[0]
    for other, _ in known[1:]:
        # in larger sets, only checksums within the range of both sketches are comparable
        end = min(max(one) if len(one) == _SKETCH else 2**32 for one in (first, other))
        missing = {one for one in first ^ other if one <= end}
        if missing and (len(missing) > 2 * slack or not first & other):
            return True
    return False
