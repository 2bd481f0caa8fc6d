"""The order in which DDP packs gradients into buckets, which decides the last bits of sums over more than two ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hasten.runtime.logs import get_logger

log = get_logger(__name__)

_NEEDED: Final = (
    *(("", "reducer"), ("reducer", "_rebuild_buckets"), ("", "_get_ddp_logging_data"), ("", "_comm_hooks")),
    *(("reducer", "_remove_autograd_hooks"), ("", "_build_params_for_reducer")),
    *(("", "_build_debug_param_to_name_mapping"), ("", "_ddp_init_helper")),
)
"""What is used of torch's own, as (where, name): hasten/testing/private_torch.py says in which versions it was seen."""


class BucketOrders:
    """Reads the order of a model's buckets and makes another model take it; does nothing where torch hides it."""

    def __init__(self) -> None:
        self._known: bool | None = None

    def unsettled(self, model: nn.Module) -> Callable[[], object] | None:
        """What the next forward would do first: pack by the order of the first backward.

        Local; what it returns is a collective for every rank (None: there is nothing to do).
        """
        if not self._reorders(model) or self.order(model) is not None:
            return None
        ddp: Any = model  # Any: the reducer is not public in torch
        rebuild: Callable[[], object] = ddp.reducer._rebuild_buckets
        return rebuild

    def order(self, model: nn.Module) -> list[int] | None:
        """Return the numbers of the trained parameters in the order they are packed; None while it is the first order."""
        if not self._reorders(model):
            return None
        ddp: Any = model
        if ddp.logger is not None:
            ddp.logger.set_runtime_stats_and_log()
        listed = ddp._get_ddp_logging_data().get("rebuilt_per_bucket_param_indices")
        return None if not listed else [int(number) for number in str(listed).replace(",", " ").split()]

    def restore(self, model: nn.Module, order: Sequence[int] | None) -> Tensor | None:
        """Make the model pack by `order`, or by the first order when it is None, whatever it has packed by so far.

        Local. What it returns is a loss, whose backward shows DDP the order with gradients of zero: a collective for every
        rank, which leaves gradients of zero behind. None when there is nothing to show.
        """
        if not self._reorders(model):
            return None
        ddp: Any = model
        trainable = [p for p in ddp.module.parameters() if p.requires_grad]
        known = order is None or sorted(order) == list(range(len(trainable)))
        now = self.order(model)
        if not known or (order is not None and now == list(order)):
            return None
        if now is not None or ddp._get_ddp_logging_data().get("iteration"):
            _begin_again(ddp)
        if order is None:
            return None
        loss = through(ddp, _InOrder([trainable[index] for index in order]))
        for parameter in trainable:
            parameter.grad = None
        return loss

    def _reorders(self, model: nn.Module) -> bool:
        if not isinstance(model, DistributedDataParallel):
            return False
        ddp: Any = model
        if self._known is None:
            self._known = self._probe(ddp)
        return self._known and not (ddp.static_graph or ddp.find_unused_parameters or ddp._comm_hooks)

    def _probe(self, ddp: Any) -> bool:
        """Return whether this torch has what is needed; what is missing is logged once."""
        missing = [
            f"{where}.{name}".strip(".")
            for where, name in _NEEDED
            if not hasattr(getattr(ddp, where, None) if where else ddp, name)
        ]
        if missing:
            log.warning(
                "DistributedDataParallel of torch %s has no %s, so checkpoints cannot keep the order in which it packs "
                "gradients. A resumed run on more than two ranks then differs from an uninterrupted one by the rounding of "
                "its sums: gradients of the first step agree to a relative 1e-6 in float32, not bit for bit.",
                torch.__version__,
                ", ".join(missing),
            )
        return not missing


def _begin_again(ddp: Any) -> None:  # Any: DDP is not typed in torch
    """Give the model new buckets in the order of a model that has seen no batch; the old ones are freed before."""
    ddp.reducer._remove_autograd_hooks()
    ddp.reducer = ddp.logger = None
    parameters, sparse = ddp._build_params_for_reducer()
    names = ddp._build_debug_param_to_name_mapping(parameters)
    ddp._ddp_init_helper(parameters, sparse, names, ddp.static_graph)


def through(ddp: Any, stand_in: nn.Module) -> Tensor:  # Any: DDP is not typed in torch
    """What a forward of DDP gives with `stand_in` in place of the user's module; its backward is a collective."""
    own, training, sync = ddp.module, ddp.training, ddp.require_forward_param_sync
    ddp.module = stand_in
    ddp.require_forward_param_sync = False  # there are no buffers to bring into line now
    try:
        with torch.enable_grad():
            loss: Tensor = ddp.forward()  # not the call of the module, which may be compiled
    finally:
        ddp.module = own
        ddp.train(training)
        ddp.require_forward_param_sync = sync
    return loss


class _InOrder(nn.Module):
    """Makes gradients of zero become ready in a given order."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        super().__init__()
        self._in_order = tuple(parameters)  # a tuple, so that they are not registered a second time

    def forward(self) -> Tensor:
        """Zero; backward visits the parameters in their order, because it goes through this sum from its end."""
        total = torch.zeros((), device=self._in_order[0].device)
        for parameter in reversed(self._in_order):
            total = total + 0.0 * parameter.detach().new_ones(()) * parameter.reshape(-1)[0].float()
        return total
