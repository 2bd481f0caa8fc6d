"""Undoing a load on an accelerator: old values are kept on the device where there is room, on the host where not."""

from __future__ import annotations

import pytest
import torch

from hasten.checkpoint.reshard import Copy
from hasten.state import previous_state as undoing
from hasten.state.previous_state import PreviousState

pytestmark = pytest.mark.device


@pytest.mark.parametrize("room", ["device", "host"])
def test_a_failed_load_restores_every_byte(room: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if room == "host":
        monkeypatch.setattr(undoing, "_SPARE_BYTES", 2**60)
    device = torch.accelerator.current_accelerator()
    assert device is not None
    large = torch.randn(40_000_001, device=device)  # longer than one chunk, and not a multiple of it
    small, turned = torch.randn(3, device=device), torch.randn(64, 32, device=device).t()
    tensors = [large, small, turned]
    before = [tensor.clone() for tensor in tensors]
    torch.accelerator.synchronize()
    start = torch.accelerator.memory_allocated()
    undo = PreviousState()
    undo.save_targets([Copy(tensor, tensor) for tensor in tensors])
    taken = torch.accelerator.memory_allocated() - start
    assert (taken > large.numel() * 4) == (room == "device")
    for tensor in tensors:
        tensor.fill_(7.0)
    undo.__exit__(RuntimeError, RuntimeError("loading failed"), None)
    for tensor, old in zip(tensors, before, strict=True):
        assert torch.equal(tensor, old)
    assert torch.accelerator.memory_allocated() == start


def test_a_load_that_succeeds_gives_the_memory_back() -> None:
    device = torch.accelerator.current_accelerator()
    assert device is not None
    tensor = torch.randn(40_000_000, device=device)
    torch.accelerator.empty_cache()
    reserved = torch.accelerator.memory_reserved()
    with PreviousState() as undo:
        undo.save_targets([Copy(tensor, tensor)])
    assert torch.accelerator.memory_reserved() == reserved
