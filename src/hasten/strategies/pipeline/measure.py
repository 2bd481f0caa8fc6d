"""Dividing a model into pipeline stages by the time its blocks take, measured on a batch."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor, nn

from hasten.config.parallel import PipelineParallelConfig
from hasten.strategies.base import parameter_device
from hasten.strategies.pipeline.cut import decide
from hasten.strategies.pipeline.split import Placement, balanced
from hasten.trees import Tree

_ROUNDS: Final = 3


def balanced_split_points(
    model: nn.Module, batch: Tree, loss_of: Callable[[nn.Module, Tree], Tensor], num_stages: int
) -> tuple[str, ...]:
    """Names of the blocks that begin a stage, so that the slowest stage is as fast as possible: for `split_points`.

    Times the blocks in `loss_of(model, batch)` on this process, without gradients, before the model is prepared. Ranks
    may measure differently: measure on one and broadcast, or write the names into the configuration.
    """
    cut = decide(model, PipelineParallelConfig(), Placement(num_stages))
    blocks = list(model.get_submodule(cut.container).children())
    rounds = [_round(model, blocks, lambda: loss_of(model, batch)) for _ in range(_ROUNDS)]
    best = [min(times) for times in zip(*rounds, strict=True)]
    ranges = balanced(best[1:-1], num_stages, best[0], best[-1])
    prefix = f"{cut.container}." if cut.container else ""
    return tuple(prefix + cut.blocks[start] for start, _ in ranges[1:])


def _round(model: nn.Module, blocks: list[nn.Module], call: Callable[[], Tensor]) -> list[float]:
    """Seconds before the blocks, in each of them, and after them."""
    device = parameter_device(model)
    begun: list[float] = []
    ended: list[float] = []

    def now() -> float:
        if device is not None and device.type not in ("cpu", "meta"):
            torch.accelerator.synchronize(device)
        return time.perf_counter()

    handles = [block.register_forward_pre_hook(lambda *_: begun.append(now())) for block in blocks]
    handles += [block.register_forward_hook(lambda *_: ended.append(now())) for block in blocks]
    try:
        with torch.no_grad():
            start = now()
            call()
            stop = now()
    finally:
        for handle in handles:
            handle.remove()
    return [begun[0] - start, *(b - a for a, b in zip(begun, ended, strict=True)), stop - ended[-1]]
