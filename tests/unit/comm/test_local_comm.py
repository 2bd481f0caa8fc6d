"""The group of one process obeys the same rules as any other."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hasten.comm import ops
from hasten.comm.agreement import Flag, agree, vote
from hasten.comm.local import LocalComm
from hasten.errors import CommError


def test_collectives_are_the_identity_with_rows() -> None:
    comm = LocalComm()
    tree: dict[str, Any] = {
        "a": torch.arange(4).reshape(2, 2),
        "s": torch.tensor(3.0),
        "n": None,
        "t": "x",
    }
    for gathered in (ops.gather(tree, comm), ops.gather_ragged(tree, comm)):
        assert torch.equal(gathered["a"], tree["a"])
        assert gathered["s"].tolist() == [3.0]
        assert (gathered["n"], gathered["t"]) == (None, "x")
    assert torch.equal(ops.pad_across(tree, comm)["a"], tree["a"])
    assert ops.gather_object([1, 2], comm) == [1, 2]
    assert ops.reduce(torch.tensor([1, 2]), comm, "mean", scale=2.0).tolist() == [
        2.0,
        4.0,
    ]


def test_results_never_share_memory_with_arguments() -> None:
    x = torch.ones(2)
    for result in (
        LocalComm().all_reduce(x),
        LocalComm().broadcast(x),
        LocalComm().all_gather(x),
    ):
        result.zero_()
    assert x.tolist() == [1.0, 1.0]


def test_foreign_members_and_wrong_parts_are_errors() -> None:
    with pytest.raises(CommError, match="use src=0"):
        LocalComm().broadcast(torch.ones(1), src=1)
    with pytest.raises(CommError, match="'sum', 'mean'"):
        ops.reduce(torch.ones(1), LocalComm(), "median")  # type: ignore[arg-type]  # a user's typo


def test_votes_raise_the_own_error() -> None:
    vote(LocalComm(), None, "fine")
    with pytest.raises(KeyError), agree(LocalComm(), "block"):
        raise KeyError("x")


def test_flag_is_seen_once() -> None:
    flag = Flag(LocalComm())
    assert not flag.check()
    flag.set()
    assert flag.check()
    assert not flag.check()
