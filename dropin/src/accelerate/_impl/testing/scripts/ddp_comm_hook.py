"""Checks of compressed gradients: DistributedDataParallel's communication hooks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from accelerate._impl.accelerator.facade import Accelerator
from accelerate._impl.enums import DDPCommunicationHookType
from accelerate._impl.settings.kwargs_handlers import DistributedDataParallelKwargs

# Any in this file: what `prepare` returns.


class MockModel(nn.Module):
    """A matrix whose product with itself is scaled by the rank."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.p = nn.Parameter(torch.randn(40, 20))

    def forward(self, x: Tensor, rank: int) -> Tensor:
        return self.p * (x ** (1 + rank))


def _run_and_get_grads(model: Any, rank: int) -> Tensor:
    torch.manual_seed(2020)
    model(torch.randn(40, 20), rank).mean().backward()
    gradient: Tensor = next(model.parameters()).grad
    return gradient


def test_ddp_comm_hook(
    comm_hook: Any, comm_wrapper: Any, comm_state_option: dict[str, Any]
) -> None:
    handler = DistributedDataParallelKwargs(
        comm_hook=comm_hook,
        comm_wrapper=comm_wrapper,
        comm_state_option=comm_state_option,
    )
    accelerator = Accelerator(kwargs_handlers=[handler])
    with_hook = _run_and_get_grads(
        accelerator.prepare(MockModel()), accelerator.process_index
    )
    plain = _run_and_get_grads(
        Accelerator().prepare(MockModel()), accelerator.process_index
    )
    assert torch.allclose(with_hook, plain, rtol=1e-2, atol=1e-2), (
        f"{with_hook} is far from {plain}"
    )


def main() -> None:
    """Check every pair of a hook and a wrapper that the device allows."""
    kinds = DDPCommunicationHookType
    cuda = torch.cuda.is_available()
    hooks = [
        kinds.NO,
        kinds.FP16,
        *([kinds.BF16, kinds.POWER_SGD, kinds.BATCHED_POWER_SGD] if cuda else []),
    ]
    for hook in hooks:
        # a wrapper casts around it
        for wrapper in (kinds.NO, kinds.FP16) if "power" in hook.value else (kinds.NO,):
            test_ddp_comm_hook(hook, wrapper, {})
