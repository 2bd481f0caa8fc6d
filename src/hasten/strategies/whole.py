"""Parameters that a sharded model keeps whole on every rank, and the averaging of their gradients."""

from __future__ import annotations

from torch import Tensor, nn

from hasten.comm.base import Comm


class Averaged:
    """A gradient hook: the mean over the ranks that read different samples, in every backward."""

    def __init__(self, comm: Comm) -> None:
        self._comm = comm

    def __call__(self, grad: Tensor) -> Tensor:
        return self._comm.all_reduce(grad, "mean")


def scalars(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters without a dimension to shard along, such as a learned temperature."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.ndim == 0}


def average_gradients(parameters: list[nn.Parameter], comm: Comm) -> None:
    """Synchronise the gradients of whole parameters as FSDP does those of its shards."""
    if comm.size == 1:
        return
    for parameter in parameters:
        if parameter.requires_grad:
            parameter.register_hook(Averaged(comm))  # type: ignore[no-untyped-call]  # torch leaves it untyped
