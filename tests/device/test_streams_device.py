"""Small copies to the host on an accelerator: right values, and no wait of the compute stream behind larger copies."""

from __future__ import annotations

import pytest
import torch

from hasten.runtime.streams import HostCopy, on_stream

pytestmark = pytest.mark.device


@pytest.fixture(scope="module", autouse=True)
def warm_up_device() -> None:
    """The driver's handles stay for the life of the process; they are no test's leak."""
    if torch.cuda.is_available():
        torch.zeros(2, device="cuda").sum().item()


def test_values_arrive_and_the_compute_stream_does_not_wait_for_larger_copies() -> None:
    device = torch.device("cuda")
    # a gibibyte, tens of milliseconds over the link
    large = torch.ones(2**28, device=device)
    host_buffer = torch.empty(large.shape, pin_memory=True)
    side = torch.Stream(device)
    large_copies_ended: list[bool] = []
    # CUDA itself waits where memory is allocated and kernels are loaded, at first
    for _ in range(3):
        torch.cuda.synchronize()
        with on_stream(side):
            for _ in range(8):
                host_buffer.copy_(large, non_blocking=True)
            copied = torch.Event(device)
            copied.record(side)
        host_copy = HostCopy(torch.arange(5.0, device=device) + 1)
        computed = torch.Event(device)
        computed.record()
        computed.synchronize()
        large_copies_ended.append(copied.query())
        assert host_copy.wait().tolist() == [1, 2, 3, 4, 5]
    assert not large_copies_ended[-1], "the compute stream waited for the larger copies"


def test_memory_of_the_source_is_not_reused_before_it_was_copied() -> None:
    device = torch.device("cuda")
    for number in range(200):
        copies = [
            HostCopy(torch.full((1024,), float(number + k), device=device))
            for k in range(4)
        ]
        for _ in range(4):
            # would overwrite memory that was freed too early
            torch.full((1024,), -1.0, device=device)
        assert [float(host_copy.wait().max()) for host_copy in copies] == [
            number + k for k in range(4)
        ]
        assert [float(host_copy.wait().min()) for host_copy in copies] == [
            number + k for k in range(4)
        ]
