"""A loader's position and its form as JSON values, sufficient to resume, also with another world size."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any, Final, Literal

import msgspec

from hasten.errors import DataError, LoaderStateError

Unit = Literal["samples", "batches", "stream"]
Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]

Part = tuple[Count, Count | None]
"""The number of shards, and the number of units of this rank's shard, if known."""

Witness = tuple[Count, Count]
"""The number of units at the start of the order that were checked, and their checksum."""

_VERSION: Final = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """Common position of all ranks in the global order of an epoch."""

    epoch: Count = 0
    consumed: Count = 0
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
    batches: Count = 0
    """Number of this rank's batches of the epoch before this position, if they were counted: for streams, and by skipping."""

    def begin(self, epoch: int) -> Position:
        """Return the start of `epoch`."""
        return Position(epoch=epoch, seed=self.seed)


class _StreamRecord(msgspec.Struct):
    """Fields of a saved stream's state, as far as they are checked; each list has one value per worker."""

    workers: Count
    positions: list[Count]
    turn: Count
    states: list[Any] | None = None
    rngs: list[Any] | None = None
    origins: list[Any] | None = None


class _LoaderRecord(msgspec.Struct):
    """Required fields of a saved loader's state besides those of its position."""

    unit: Unit
    size: Count | None
    epoch: Count
    consumed: Count
    seed: int


def encode(position: Position, unit: Unit, size: int | None) -> dict[str, Any]:
    """Return the position as JSON values, with the facts needed to refuse a loader it does not belong to."""
    state: dict[str, Any] = {"version": _VERSION, "unit": unit, "size": size}
    for field in fields(position):
        field_value = getattr(position, field.name)
        if field.name in ("epoch", "consumed", "seed") or field_value != field.default:
            state[field.name] = (
                list(field_value) if isinstance(field_value, tuple) else field_value
            )
    # of other loaders, another world size has another number
    if unit != "stream" or not position.consumed:
        state.pop("batches", None)
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
    if state.get("version") != _VERSION:
        raise LoaderStateError(
            f"the loader's state has version {state.get('version')}, and this hasten reads version {_VERSION}; continuing could repeat or "
            "lose samples. Resume with the version of hasten that wrote it, or start a new epoch."
        )
    try:
        msgspec.convert(state, _LoaderRecord)
        position = msgspec.convert(state, Position)
        if position.stream is not None:
            _check_stream(position.stream)
    except msgspec.ValidationError as error:
        raise LoaderStateError(
            f"the loader's state is invalid ({error}), so it is damaged, was edited, or was not written by hasten. Nothing was loaded. "
            "Pass an unchanged state_dict() of a prepared loader, or start a new epoch."
        ) from error
    if state["consumed"] and state["unit"] != unit:
        raise DataError(
            f"the loader's state counts {state['unit']}, and this loader counts {unit}: its dataset or batch sampler is of a different "
            "kind, so the position is invalid. Prepare the loader of the saved run."
        )
    # shards are compared when they are read
    compares_sizes = "part" not in state and (size is not None or unit == "stream")
    if state["consumed"] and compares_sizes and state["size"] != size:
        raise DataError(
            f"the loader's state is {state['consumed']} {unit} into an epoch of {state['size']}, and this loader's "
            f"epoch has {size}; its order is different, so samples would be repeated or lost. Restore the dataset, "
            f"or start a new epoch with loader.set_epoch({state['epoch'] + 1}) and no loaded state."
        )
    return position


def _check_stream(state: Mapping[str, Any]) -> None:
    """Raise msgspec.ValidationError unless a stream's state has one value per worker."""
    record = msgspec.convert(state, _StreamRecord)
    for values in (record.positions, record.states, record.rngs, record.origins):
        if values is not None and len(values) != record.workers:
            raise msgspec.ValidationError(
                f"{len(values)} values for {record.workers} workers - at `$.stream`"
            )
