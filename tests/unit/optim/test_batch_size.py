"""The search for a batch size that fits."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hasten.comm.local import LocalComm
from hasten.errors import ConfigError, StepError
from hasten.optim.batch_size import find_executable_batch_size, should_reduce_batch_size


class FakeAccelerator:
    """What the search needs of an Accelerator."""

    def __init__(self, steps: int = 1) -> None:
        self.gradient_accumulation_steps = steps
        # Any: its world is used alone
        self.ctx: Any = SimpleNamespace(world=LocalComm())


def fits_below(limit: int, tried_sizes: list[int], batch_size: int) -> int:
    tried_sizes.append(batch_size)
    if batch_size >= limit:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
    return batch_size


def test_it_shrinks_until_it_fits_and_passes_arguments() -> None:
    tried_sizes: list[int] = []

    @find_executable_batch_size
    def train(batch_size: int, word: str, *, times: int) -> str:
        return word * times * (fits_below(100, tried_sizes, batch_size) > 0)

    assert train("a", times=2) == "aa"
    assert tried_sizes == [128, 115, 103, 92]


@pytest.mark.parametrize("with_parentheses", [True, False])
def test_a_custom_reduction_is_honoured_in_both_forms(with_parentheses: bool) -> None:
    tried_sizes: list[int] = []

    def train(batch_size: int) -> int:
        return fits_below(20, tried_sizes, batch_size)

    def minus_ten(size: int) -> int:
        return size - 10

    if with_parentheses:
        fitting_size = find_executable_batch_size(
            starting_batch_size=40, reduce_batch_size_fn=minus_ten
        )(train)()
    else:
        fitting_size = find_executable_batch_size(train, 40, minus_ten)()
    assert fitting_size == 10
    assert tried_sizes == [40, 30, 20, 10]


def test_a_reduction_that_counts_by_itself_is_called_without_arguments() -> None:
    tried_sizes: list[int] = []
    sizes = iter((30, 25, 15))
    fitting_size = find_executable_batch_size(
        lambda size: fits_below(20, tried_sizes, size), 40, lambda: next(sizes)
    )()
    assert (fitting_size, tried_sizes) == (15, [40, 30, 25, 15])


def test_the_global_batch_is_kept_by_more_accumulation() -> None:
    stand, tried_sizes = FakeAccelerator(steps=2), list[int]()

    @find_executable_batch_size(
        starting_batch_size=24, accelerator=stand, keep_global_batch=True
    )
    def train(batch_size: int) -> int:
        assert batch_size * stand.gradient_accumulation_steps == 48
        return fits_below(7, tried_sizes, batch_size)

    assert train() == 6
    assert tried_sizes == [24, 12, 8, 6]
    assert stand.gradient_accumulation_steps == 8


def test_what_cannot_be_searched_is_said() -> None:
    with pytest.raises(ConfigError, match="Pass accelerator="):
        find_executable_batch_size(lambda batch_size: None, keep_global_batch=True)
    with pytest.raises(ConfigError, match="does not divide the starting batch size 10"):
        find_executable_batch_size(
            lambda batch_size: fits_below(0, [], batch_size),
            10,
            lambda size: size - 3,
            accelerator=FakeAccelerator(),
            keep_global_batch=True,
        )()
    with pytest.raises(ConfigError, match="not smaller"):
        find_executable_batch_size(
            lambda batch_size: fits_below(0, [], batch_size), 10, lambda size: size
        )()
    with pytest.raises(StepError, match="ran out of memory at every batch size from 4"):
        find_executable_batch_size(
            lambda batch_size: fits_below(0, [], batch_size), 4
        )()
    with pytest.raises(TypeError, match="Leave it out of the call"):
        find_executable_batch_size(lambda batch_size: None)(16)  # type: ignore[call-arg]


def test_other_errors_pass_through_and_memory_errors_are_known() -> None:
    @find_executable_batch_size
    def train(batch_size: int) -> None:
        raise ValueError("a bug")

    with pytest.raises(ValueError, match="a bug"):
        train()
    assert should_reduce_batch_size(
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory")
    )
    assert not should_reduce_batch_size(RuntimeError("shapes do not match"))


def test_memory_of_the_failed_attempt_is_free_before_the_next(
    caplog: pytest.LogCaptureFixture,
) -> None:
    alive: list[int] = []

    class LargeObject:
        def __del__(self) -> None:
            alive.append(-1)

    @find_executable_batch_size(starting_batch_size=2)
    def train(batch_size: int) -> int:
        big = LargeObject()
        if batch_size == 2:
            raise torch.OutOfMemoryError("out of memory")
        del big
        return alive.count(-1)

    with caplog.at_level(logging.WARNING, "hasten"):
        assert train() == 2
    assert "batch size 2 does not fit" in caplog.text
