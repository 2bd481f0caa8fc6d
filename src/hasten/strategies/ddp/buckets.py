"""Order in which DDP packs gradients into buckets, which determines the rounding of sums over more than two ranks."""

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
"""Private attributes of torch in use, as (object, name): tests/support/private_torch.py lists the versions tested."""


class BucketOrders:
    """Order of DDP's buckets, saved and restored; does nothing where torch does not expose the order."""

    def __init__(self) -> None:
        self._known: bool | None = None

    def unsettled(self, model: nn.Module) -> Callable[[], object] | None:
        """Return the rebuilding of the buckets in the order of the first backward, which the next forward would do first.

        Local; the returned function is a collective for every rank. None if there is nothing to rebuild.
        """
        if not self._reorders(model) or self.order(model) is not None:
            return None
        ddp: Any = model  # Any: the reducer is not public in torch
        rebuild: Callable[[], object] = ddp.reducer._rebuild_buckets
        return rebuild

    def order(self, model: nn.Module) -> list[int] | None:
        """Return the indices of the trained parameters in bucket order; None while it is the initial order."""
        if not self._reorders(model):
            return None
        ddp: Any = model
        if ddp.logger is not None:
            ddp.logger.set_runtime_stats_and_log()
        listed = ddp._get_ddp_logging_data().get("rebuilt_per_bucket_param_indices")
        return None if not listed else [int(number) for number in str(listed).replace(",", " ").split()]

    def restore(self, model: nn.Module, order: Sequence[int] | None) -> Tensor | None:
        """Make the model pack gradients by `order`, or by the initial order if it is None.

        Local. Returns a loss whose backward makes zero gradients ready in this order, from which DDP learns it: a collective for
        every rank, which leaves zero gradients behind. None if the order need not change.
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
        """Return whether this torch has the private attributes needed; missing ones are logged once."""
        missing = [
            f"{where}.{name}".strip(".")
            for where, name in _NEEDED
            if not hasattr(getattr(ddp, where, None) if where else ddp, name)
        ]
        if missing:
            log.warning(
                "DistributedDataParallel of torch %s has no %s, so checkpoints cannot store the order in which it buckets gradients. A "
                "resumed run on more than two ranks then differs from an uninterrupted one by the rounding of "
                "its sums: gradients of the first step agree to a relative 1e-6 in float32, not bit for bit.",
                torch.__version__,
                ", ".join(missing),
            )
        return not missing


def _begin_again(ddp: Any) -> None:  # Any: DDP is not typed in torch
    """Give the model new buckets in the initial order; the old buckets are freed first."""
    ddp.reducer._remove_autograd_hooks()
    ddp.reducer = ddp.logger = None
    parameters, sparse = ddp._build_params_for_reducer()
    names = ddp._build_debug_param_to_name_mapping(parameters)
    ddp._ddp_init_helper(parameters, sparse, names, ddp.static_graph)


def through(ddp: Any, stand_in: nn.Module) -> Tensor:  # Any: DDP is not typed in torch
    """Run a forward of DDP with `stand_in` in place of the user's module; the backward of its loss is a collective."""
    own, training, sync = ddp.module, ddp.training, ddp.require_forward_param_sync
    ddp.module = stand_in
    ddp.require_forward_param_sync = False  # no buffers to synchronise here
    try:
        with torch.enable_grad():
            loss: Tensor = ddp.forward()  # not __call__, which may be compiled
    finally:
        ddp.module = own
        ddp.train(training)
        ddp.require_forward_param_sync = sync
    return loss


class _InOrder(nn.Module):
    """Module whose zero gradients become ready in a given order."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        super().__init__()
        self._in_order = tuple(parameters)  # a tuple, so that the parameters are not registered again

    def forward(self) -> Tensor:
        """Return zero; backward visits the parameters in their order, because it traverses this sum from its end."""
        total = torch.zeros((), device=self._in_order[0].device)
        for parameter in reversed(self._in_order):
            total = total + 0.0 * parameter.detach().new_ones(()) * parameter.reshape(-1)[0].float()
        return total
