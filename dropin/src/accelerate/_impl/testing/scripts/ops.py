"""Checks of the operations on tensors of several processes; each function takes the state of the process."""

from __future__ import annotations

from typing import Any

import torch

from accelerate._impl import tensors
from accelerate._impl.environment.variables import patch_environment
from accelerate._impl.tensors import DistributedOperationException
from accelerate._impl.testing.cases import assert_exception
from accelerate._impl.views.state import PartialState

# Any in this file: PartialState's attributes live in a shared dictionary.


def create_tensor(state: Any) -> torch.Tensor:
    """Return one element for each process, different on every process: 1 to 2 on the first of two, 3 to 4 on the second."""
    first = 1.0 + state.num_processes * state.process_index
    return torch.arange(first, first + state.num_processes, device=state.device)


def _all_processes(state: Any) -> torch.Tensor:
    return torch.arange(1.0, state.num_processes**2 + 1, device=state.device)


def _assert_equal(actual: Any, expected: Any) -> None:
    if isinstance(actual, torch.Tensor):
        is_equal = torch.equal(actual, expected)
    else:
        is_equal = actual == expected
    assert is_equal, f"the processes got {actual} instead of {expected}"


def test_gather(state: Any) -> None:
    _assert_equal(tensors.gather(create_tensor(state)), _all_processes(state))


def test_gather_object(state: Any) -> None:
    _assert_equal(
        tensors.gather_object([state.process_index]), list(range(state.num_processes))
    )


def test_gather_non_contiguous(state: Any) -> None:
    view = torch.arange(12, device=state.device).view(4, 3).t()[:1]
    assert not view.is_contiguous() or view.shape[0] == 1
    _assert_equal(tensors.gather(view), torch.cat([view] * state.num_processes))


def test_broadcast(state: Any) -> None:
    _assert_equal(
        tensors.broadcast(create_tensor(state)),
        torch.arange(1.0, state.num_processes + 1, device=state.device),
    )


def test_pad_across_processes(state: Any) -> None:
    """Check that shorter tensors are filled with zeros up to the longest one's length."""
    local_tensor = torch.arange(
        state.num_processes + (state.process_index == 0), device=state.device
    )
    padded = tensors.pad_across_processes(local_tensor)
    _assert_equal(padded.shape, torch.Size([state.num_processes + 1]))
    _assert_equal(padded[: len(local_tensor)], local_tensor)
    assert not padded[len(local_tensor) :].any(), (
        f"padded with {padded[len(local_tensor) :]}"
    )


def test_reduce_sum(state: Any) -> None:
    _assert_equal(
        tensors.reduce(create_tensor(state), "sum"),
        _all_processes(state).view(state.num_processes, -1).sum(0),
    )


def test_reduce_mean(state: Any) -> None:
    _assert_equal(
        tensors.reduce(create_tensor(state), "mean"),
        _all_processes(state).view(state.num_processes, -1).mean(0),
    )


def test_reduce_max(state: Any) -> None:
    largest = tensors.gather(create_tensor(state)).max()
    _assert_equal(
        largest, torch.tensor(float(state.num_processes**2), device=state.device)
    )


def test_op_checker(state: Any) -> None:
    """Check that unequal shapes are named before they can hang, where ACCELERATE_DEBUG_MODE asks for that."""
    if state.num_processes == 1:
        return
    saved_debug = state.debug
    state.debug = True
    try:
        with patch_environment(ACCELERATE_DEBUG_MODE="1"):
            uneven = torch.zeros(2 + state.process_index, device=state.device)
            for operation in (tensors.gather, tensors.broadcast, tensors.reduce):
                with assert_exception(
                    DistributedOperationException,
                    ": [2]}\n  - Process 1: {'tensor': [3]}",
                ):
                    operation({"tensor": uneven})
    finally:
        state.debug = saved_debug


def test_copy_tensor_to_devices(state: Any) -> None:
    """Check that every process has the first one's tensor after it was sent, on XLA devices."""
    if state.device.type == "xla":
        _assert_equal(
            tensors.copy_tensor_to_devices(create_tensor(state)),
            torch.arange(1.0, state.num_processes + 1),
        )


def main() -> None:
    process_state = PartialState()
    process_state.print(f"State: {process_state}")
    checks = (
        *(
            test_gather,
            test_gather_object,
            test_gather_non_contiguous,
            test_broadcast,
            test_pad_across_processes,
        ),
        *(
            test_reduce_sum,
            test_reduce_mean,
            test_reduce_max,
            test_op_checker,
            test_copy_tensor_to_devices,
        ),
    )
    for check in checks:
        process_state.print(f"testing {check.__name__.removeprefix('test_')}")
        check(process_state)
