"""Copies to the host where the tensor is there already: values at once, without a copy."""

from __future__ import annotations

import torch

from hasten.runtime.streams import HostCopy


def test_a_tensor_on_the_host_is_ready_and_not_copied() -> None:
    source = torch.tensor([1.0, 2.0])
    copied = HostCopy(source)
    assert copied.is_ready()
    assert copied.wait() is source
    assert copied.wait().tolist() == [1.0, 2.0]
