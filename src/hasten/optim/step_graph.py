"""A training step as one CUDA graph: captured once for inputs of one shape, then replayed on copies of other inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hasten import trees
from hasten.trees import Tree


class StepGraph:
    """Captured work of `function(*inputs)`: forward, backward and updates of `optimizers`, which must be fused.

    A graph holds addresses and constants. Learning rates are read anew at every replay; any other change of the
    optimizers' options, or tensors at other addresses, make it stale.
    """

    def __init__(
        self,
        function: Callable[..., Any],  # Any: the result of the user's step
        inputs: Tree,
        models: Sequence[nn.Module],
        optimizers: Sequence[Optimizer],
        stream: torch.cuda.Stream,
    ) -> None:
        self._models, self._optimizers = models, optimizers
        self._inputs = [tensor.clone() for tensor in trees.tensors(inputs)]
        self._rates = [_Rate(group) for optimizer in optimizers for group in optimizer.param_groups]
        self._graph = torch.cuda.CUDAGraph()
        static = trees.replace_tensors(inputs, self._inputs)
        with (
            _capturable(self._rates),
            # thread_local: a loader's threads may call CUDA meanwhile
            torch.cuda.graph(self._graph, stream=stream, capture_error_mode="thread_local"),
        ):
            returned = function(*static)
        self._returned = trees.map_tensors(Tensor.detach, returned)
        self._outputs = trees.tensors(self._returned)
        self._places = self._addresses()
        self._options = [rate.options() for rate in self._rates]

    @property
    def stale(self) -> bool:
        """True if options or addresses have changed since the capture."""
        groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        return (
            len(self._rates) != len(groups)
            or any(rate.group is not group for rate, group in zip(self._rates, groups, strict=True))
            or self._options != [rate.options() for rate in self._rates]
            or self._places != self._addresses()
        )

    def replay(self, inputs: Tree) -> Tree:
        """Run the step on other inputs of the same shapes; return its result in new tensors."""
        for own, given in zip(self._inputs, trees.tensors(inputs), strict=True):
            own.copy_(given, non_blocking=True)
        for rate in self._rates:
            rate.follow()
        self._graph.replay()
        fresh = [tensor.clone() for tensor in self._outputs]
        return trees.replace_tensors(self._returned, fresh) if fresh else self._returned

    def _addresses(self) -> list[int]:
        """Return the addresses of all tensors that a step reads and writes besides its inputs."""
        held = [tensor.data_ptr() for model in self._models for tensor in (*model.parameters(), *model.buffers())]
        for optimizer in self._optimizers:
            for state in optimizer.state.values():
                held += [value.data_ptr() for value in state.values() if isinstance(value, Tensor)]
        return held


class _Rate:
    """Learning rate of a group: a number for the user and schedulers, a tensor on the device for the graph."""

    def __init__(self, group: dict[str, Any]) -> None:
        self.group = group
        device = group["params"][0].device
        self._last = float(group["lr"])
        self.tensor = torch.full((), self._last, dtype=torch.float32, device=device)

    def options(self) -> dict[str, Any]:  # Any: torch's options of an optimizer
        """Return the options that are constants in a graph, and the number of parameters."""
        kept = {name: value for name, value in self.group.items() if name not in ("lr", "params", "initial_lr")}
        return {**kept, "params": len(self.group["params"])}

    def follow(self) -> None:
        """Copy the group's current learning rate to the tensor."""
        now = float(self.group["lr"])
        if now != self._last:
            self._last = now
            self.tensor.fill_(now)


@contextmanager
def _capturable(rates: Sequence[_Rate]) -> Iterator[None]:
    """Context manager in which optimizers can be captured: they read learning rates from the device."""
    before = [(rate.group["lr"], rate.group.get("capturable")) for rate in rates]
    for rate in rates:
        rate.group["lr"] = rate.tensor
        if "capturable" in rate.group:
            rate.group["capturable"] = True
    try:
        yield
    finally:
        for rate, (lr, capturable) in zip(rates, before, strict=True):
            rate.group["lr"] = lr
            if "capturable" in rate.group:
                rate.group["capturable"] = capturable
