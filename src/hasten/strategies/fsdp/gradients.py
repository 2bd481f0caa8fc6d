"""Gradients that FSDP2 holds between two reductions, in private attributes outside the parameters' .grad."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from hasten.errors import CheckpointError
from hasten.modules.names import local_tensor
from hasten.runtime.logs import get_logger
from hasten.strategies.base import PARTIAL, UNSHARDED

log = get_logger(__name__)

_NEEDED: Final = ("fsdp_params", "_partial_reduce_output")
_NEEDED_OF_PARAMETER: Final = ("sharded_param", "unsharded_accumulated_grad")
"""Private attributes of torch in use: tests/support/private_torch.py lists the versions tested."""


class HeldGradients:
    """Access to the gradients that FSDP2 holds, where this torch exposes them."""

    def __init__(self) -> None:
        self._known: bool | None = None

    def find(
        self, model: nn.Module, names: Mapping[int, str], replicated: bool, open_window: bool
    ) -> dict[str, Tensor]:
        """Return the gradients held on this rank, by parameter name (for a group, the name of its first parameter).

        Raises: CheckpointError in an open window whose gradients this torch does not expose.
        """
        if not self._shown(model):
            if replicated and open_window:
                raise CheckpointError(
                    f"FSDP2 of torch {torch.__version__} does not expose the gradients that are reduced over shards but not yet over "
                    "replicas, so a checkpoint inside an accumulation window would lose them. Save at the end of a window "
                    "(accelerator.sync_gradients)."
                )
            return {}
        found: dict[str, Tensor] = {}
        for group in _groups(model):
            if group._partial_reduce_output is not None:
                found[PARTIAL + _group_name(group, names)] = group._partial_reduce_output.detach()
            for held in group.fsdp_params:
                gathered = held.unsharded_accumulated_grad
                if gathered is None and getattr(held, "_unsharded_param", None) is not None:
                    gathered = held._unsharded_param.grad
                if gathered is not None:
                    found[UNSHARDED + names[id(held.sharded_param)]] = local_tensor(gathered).detach()
        return found

    def put(self, model: nn.Module, names: Mapping[int, str], saved: Mapping[str, Tensor]) -> None:
        """Replace the gradients that FSDP2 holds by `saved`."""
        if not self._shown(model):
            return
        for group in _groups(model):
            partial = saved.get(PARTIAL + _group_name(group, names))
            device = local_tensor(group.fsdp_params[0].sharded_param).device
            group._partial_reduce_output = None if partial is None else partial.to(device, copy=True)
            for held in group.fsdp_params:
                gathered = saved.get(UNSHARDED + names[id(held.sharded_param)])
                held.unsharded_accumulated_grad = None if gathered is None else gathered.to(device, copy=True)

    def groups(self, model: nn.Module, names: Mapping[int, str]) -> dict[str, list[str]]:
        """Return the parameters of each group, by the name of the first; a group's gradients fit no other group."""
        if not self._shown(model):
            return {}
        return {
            _group_name(group, names): [names[id(held.sharded_param)] for held in group.fsdp_params]
            for group in _groups(model)
        }

    def _shown(self, model: nn.Module) -> bool:
        if self._known is None and isinstance(model, FSDPModule):
            self._known = self._probe(model)
        return bool(self._known)

    def _probe(self, model: nn.Module) -> bool:
        """Return whether this torch has the private attributes needed; missing ones are logged once."""
        missing: list[str] = []
        if not hasattr(model, "_get_fsdp_state"):
            missing.append("_get_fsdp_state")
        else:
            group = next(_all_groups(model), None)
            missing += [name for name in _NEEDED if not hasattr(group, name)]
            held = next(iter(getattr(group, "fsdp_params", ())), None)
            missing += [name for name in _NEEDED_OF_PARAMETER if held is not None and not hasattr(held, name)]
        if missing:
            log.warning(
                "FSDP2 of torch %s has no %s, so gradients between two reductions cannot be saved. Plain sharding is not affected, "
                "because it reduces in every backward, unless set_requires_gradient_sync(False) was called; with shards and replicas, "
                "save only at the end of an accumulation window.",
                torch.__version__,
                ", ".join(missing),
            )
        return not missing


def _group_name(group: Any, names: Mapping[int, str]) -> str:  # Any: not public in torch
    return names[id(group.fsdp_params[0].sharded_param)]


def _groups(model: nn.Module) -> Iterator[Any]:
    """Return FSDP's private records of its parameters, one per shard group."""
    return (group for group in _all_groups(model) if group.fsdp_params)


def _all_groups(model: nn.Module) -> Iterator[Any]:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            state: Any = module._get_fsdp_state()
            # torch<2.12 has one group per module, later versions a list of groups.
            groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
            yield from (group for group in groups if group is not None)
