"""Positions as JSON: what is written is read back, and positions of another order are refused."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any, cast

import pytest

from hasten.data.loader import decode_position, encode_position
from hasten.data.position import Position, Unit
from hasten.errors import DataError, LoaderStateError

STREAM: dict[str, Any] = {"workers": 2, "positions": [3, 4], "turn": 1}


def test_a_loader_starts_at_the_beginning() -> None:
    start = Position()
    assert (start.epoch, start.consumed, start.seed, start.batches) == (0, 0, 0, 0)
    assert start.ahead is False
    moved = Position(epoch=2, consumed=7, seed=9, ahead=True, batches=3, part=(2, 5))
    assert moved.begin(4) == Position(epoch=4, seed=9)


@pytest.mark.parametrize("unit", ["samples", "batches", "stream"])
@pytest.mark.parametrize("consumed", [0, 6, 2**63 - 1])
def test_positions_are_read_back(unit: Unit, consumed: int) -> None:
    full = Position(
        epoch=3,
        consumed=consumed,
        seed=-5,
        generator={"generators": {}},
        witness=(2, 77),
        stream=STREAM,
        ahead=True,
        part=(2, None),
        batches=4,
    )
    # the number of batches is that of one world size, and streams alone need it
    has_batches = unit == "stream" and consumed > 0
    assert encode_position(full, unit, 9) == {
        "version": 1,
        "unit": unit,
        "size": 9,
        "epoch": 3,
        "consumed": consumed,
        "seed": -5,
        "generator": {"generators": {}},
        "witness": [2, 77],
        "stream": STREAM,
        "ahead": True,
        "part": [2, None],
    } | ({"batches": 4} if has_batches else {})
    written = json.loads(json.dumps(encode_position(full, unit, 9)))
    assert decode_position(written, unit, 9) == replace(full, batches=4 * has_batches)
    assert encode_position(Position(), unit, None) == {
        "version": 1,
        "unit": unit,
        "size": None,
        "epoch": 0,
        "consumed": 0,
        "seed": 0,
    }


@pytest.mark.parametrize("saved_unit", ["samples", "batches", "stream"])
@pytest.mark.parametrize("unit", ["samples", "batches", "stream"])
@pytest.mark.parametrize("saved_size", [None, 8, 9])
@pytest.mark.parametrize("size", [None, 8, 9])
@pytest.mark.parametrize("part", [None, (2, 4)])
def test_positions_inside_an_epoch_belong_to_one_order(
    saved_unit: Unit,
    unit: Unit,
    saved_size: int | None,
    size: int | None,
    part: tuple[int, int] | None,
) -> None:
    position = Position(epoch=1, consumed=4, part=part)
    state = encode_position(position, saved_unit, saved_size)
    # a size that is unknown here is not compared, except that of a stream
    is_size_known = size is not None or unit == "stream"
    has_other_size = part is None and is_size_known and size != saved_size
    if unit != saved_unit:
        with pytest.raises(DataError, match=f"counts {saved_unit}, and this loader"):
            decode_position(state, unit, size)
    elif has_other_size:
        with pytest.raises(DataError, match=r"4 \w+ into an epoch of .*set_epoch\(2\)"):
            decode_position(state, unit, size)
    else:
        assert decode_position(state, unit, size) == position
    # at the start of an epoch any loader may go on
    start = encode_position(replace(position, consumed=0), saved_unit, saved_size)
    assert decode_position(start, unit, size).epoch == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "version 2, and this hasten reads version 1"),
        ({"version": None}, "version None"),
        ({"epoch": -1}, ">= 0"),
        ({"consumed": 2**63}, "consumed"),
        ({"consumed": "4"}, "consumed"),
        ({"unit": "rows"}, "unit"),
        ({"witness": [1]}, "witness"),
        ({"stream": {}}, "workers"),
        ({"stream": STREAM | {"positions": [3]}}, "1 values for 2 workers"),
        ({"stream": STREAM | {"states": [1, 2, 3]}}, "3 values for 2 workers"),
        ({"stream": STREAM | {"rngs": []}}, "0 values for 2 workers"),
        ({"stream": STREAM | {"origins": [1]}}, "1 values for 2 workers"),
    ],
)
def test_damaged_states_are_refused(change: dict[str, Any], message: str) -> None:
    state = encode_position(Position(consumed=4), "stream", 9) | change
    with pytest.raises(LoaderStateError, match=re.escape(message)):
        decode_position(state, "stream", 9)


def test_a_state_is_complete() -> None:
    state = encode_position(Position(), "samples", 9)
    for name in state:
        with pytest.raises(LoaderStateError):
            decode_position(
                {key: state[key] for key in state if key != name}, "samples", 9
            )
    with pytest.raises(LoaderStateError, match="is a list where a mapping"):
        decode_position(cast(Any, []), "samples", 9)
