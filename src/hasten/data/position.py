"""A loader's position and its form as JSON values, sufficient to resume, also with another world size."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, Literal, get_args

from hasten.errors import DataError, LoaderStateError

Unit = Literal["samples", "batches", "stream"]

Part = tuple[int, int | None]
"""The number of shards, and the number of units of this rank's shard, if known."""

BatchRange = tuple[int, int, int]
"""A global batch: its epoch, and its first position and end there, in units of the order (streams: in batches)."""

Witness = tuple[int, int]
"""The number of units at the start of the order that were checked, and their checksum."""

_VERSION: Final = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """Common position of all ranks in the global order of an epoch."""

    epoch: int = 0
    consumed: int = 0
    """Number of units of the epoch's global order that the ranks have returned."""
    seed: int = 0
    generator: Mapping[str, Any] | None = None
    """State of the user's sampler at the start of the epoch, on the rank that draws (see CarriedState)."""
    witness: Witness | None = None
    """Checksum of the start of the epoch's order, if it is drawn from a sampler of the user."""
    stream: Mapping[str, Any] | None = None
    """Additional state of a stream: positions of its workers."""
    ahead: bool = False
    """True if batches from here on are read ahead of their use, each under separate random states."""
    part: Part | None = None
    """The shard that the count refers to, if every rank has separate map-style data."""
    batches: int = 0
    """Number of this rank's batches of the epoch before this position, if they were counted: for streams, and by skipping."""
    workers_ran: bool | None = None
    """True if persistent workers ran when the position was saved, False if not, None if they do not matter."""

    def begin(self, epoch: int) -> Position:
        """Return the start of `epoch`."""
        return Position(epoch=epoch, seed=self.seed)


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _are_counts(value: object, length: int) -> bool:
    return isinstance(value, list | tuple) and len(value) == length and all(map(_is_count, value))


def _is_mapping(value: object) -> bool:
    return value is None or isinstance(value, Mapping)


def _is_stream(value: object) -> bool:
    workers = value.get("workers") if isinstance(value, Mapping) else None
    if not isinstance(value, Mapping) or not isinstance(workers, int):
        return False
    rest = [value[key] for key in ("states", "rngs", "origins") if key in value]
    sized = all(isinstance(one, list | tuple) and len(one) == workers for one in rest)
    return sized and _are_counts(value.get("positions"), workers) and _is_count(value.get("turn"))


_VALUES: Final = MappingProxyType[str, Callable[[Any], bool]](
    {
        "unit": lambda value: value in get_args(Unit),
        "size": lambda value: value is None or _is_count(value),
        "epoch": _is_count,
        "consumed": _is_count,
        "seed": lambda value: type(value) is int,
        "generator": _is_mapping,
        "witness": lambda value: _are_counts(value, 2),
        "stream": lambda value: value is None or _is_stream(value),
        "ahead": lambda value: isinstance(value, bool),
        "batches": _is_count,
        "workers_ran": lambda value: value is None or isinstance(value, bool),
        "left_out": lambda value: isinstance(value, list | tuple) and all(_are_counts(one, 3) for one in value),
    }
)
"""Checks of the values in a loader's state, by key."""


def encode(position: Position, unit: Unit, size: int | None) -> dict[str, Any]:
    """Return the position as JSON values, with the facts needed to refuse a loader it does not belong to."""
    state: dict[str, Any] = {
        "version": _VERSION,
        "unit": unit,
        "size": size,
        "epoch": position.epoch,
        "consumed": position.consumed,
        "seed": position.seed,
    }
    if position.generator is not None:
        state["generator"] = dict(position.generator)
    if position.witness is not None:
        state["witness"] = list(position.witness)
    if position.stream is not None:
        state["stream"] = dict(position.stream)
    if position.ahead:
        state["ahead"] = True
    if position.part is not None:
        state["part"] = list(position.part)
    if position.workers_ran is not None:
        state["workers_ran"] = position.workers_ran
    if unit == "stream" and position.consumed:  # of other loaders, another world size has another number
        state["batches"] = position.batches
    return state


def decode(state: Mapping[str, Any], unit: Unit, size: int | None) -> Position:
    """Return the position that `encode` wrote.

    Raises: LoaderStateError for an invalid state; DataError when it was written by a loader with another order.
    """
    if not isinstance(state, Mapping):
        raise LoaderStateError(
            f"the loader's state is a {type(state).__name__} where a mapping is expected, so there is no position to continue from. "
            "Pass the state_dict() of a prepared loader."
        )
    missing = [key for key in ("version", "unit", "size", "epoch", "consumed", "seed") if key not in state]
    if missing:
        raise LoaderStateError(
            f"the loader's state has no {', '.join(missing)} (found: {', '.join(map(str, state)) or 'nothing'}), so it was not written "
            "by hasten. Pass the state_dict() of a prepared loader."
        )
    if state["version"] != _VERSION:
        raise LoaderStateError(
            f"the loader's state has version {state['version']}, and this hasten reads version {_VERSION}; continuing could repeat or "
            "lose samples. Resume with the version of hasten that wrote it, or start a new epoch."
        )
    if wrong := [key for key, fits in _VALUES.items() if key in state and not fits(state[key])]:
        raise LoaderStateError(
            f"the loader's state has {wrong[0]}={state[wrong[0]]!r:.80}, which is invalid, so it is damaged or was edited. Nothing was "
            "loaded. Pass an unchanged state_dict(), or start a new epoch."
        )
    if state["consumed"] and state["unit"] != unit:
        raise DataError(
            f"the loader's state counts {state['unit']}, and this loader counts {unit}: its dataset or batch sampler is of a different "
            "kind, so the position is invalid. Prepare the loader of the saved run."
        )
    sizes = "part" not in state and (size is not None or unit == "stream")  # shards are compared when they are read
    if state["consumed"] and sizes and state["size"] != size:
        raise DataError(
            f"the loader's state is {state['consumed']} {unit} into an epoch of {state['size']}, and this loader's "
            f"epoch has {size}; its order is different, so samples would be repeated or lost. Restore the dataset, "
            f"or start a new epoch with loader.set_epoch({state['epoch'] + 1}) and no loaded state."
        )
    return Position(
        epoch=state["epoch"],
        consumed=state["consumed"],
        seed=state["seed"],
        generator=state.get("generator"),
        witness=tuple(state["witness"]) if "witness" in state else None,
        stream=state.get("stream"),
        ahead=bool(state.get("ahead", False)),
        part=tuple(state["part"]) if "part" in state else None,
        batches=state.get("batches", 0),
        workers_ran=state.get("workers_ran"),
    )
