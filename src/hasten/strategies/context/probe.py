"""Checks, on a model's first call, that it computes the same from sequence shards as from whole sequences."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hasten.errors import StepError
from hasten.strategies.context.masks import MaskReader
from hasten.strategies.context.ops import collect, held_part
from hasten.strategies.context.sdpa import Attention, AttentionPatch, SequenceAttention
from hasten.strategies.context.sequence_plan import SequenceLayout
from hasten.trees import map_tensors, tensors

# Any in this file: the arguments of the user's models.
_PER_CHUNK: Final = 2
"""Tokens of each chunk that a check uses."""
_TOLERANCE: Final = 0.05
"""Relative difference above rounding: in the first layer another position changes half of a query."""


@dataclass(slots=True)
class OpenBlock:
    """State of a running `context_parallel()` block: the buffers before sharding, and the attention inside the block."""

    layout: SequenceLayout
    rank: int
    buffers: list[tuple[Tensor, Tensor, int]]
    """Each buffer, its whole tensor, and its sequence dimension."""
    attention: SequenceAttention
    counting: Callable[[], tuple[bool, ...]]
    """Returns for each buffer whether it holds the positions 0, 1, 2, … of the sequence."""
    weigh: Callable[[Tensor, Tensor], None]
    """Weighs this rank's loss by its labels, given this rank's labels and the labels of the whole sequence."""

    def whole(self, value: object) -> tuple[Tensor, int] | None:
        """Return the whole tensor of a buffer and its sequence dimension; None for other values."""
        return next(((whole, dim) for tensor, whole, dim in self.buffers if tensor is value), None)

    def part(self, whole: Tensor, dim: int) -> Tensor:
        """Return this rank's shard of a tensor."""
        return held_part(whole, dim, self.layout, self.rank)


def check_positions(
    model: nn.Module, inner: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], block: OpenBlock
) -> None:
    """Run the first tokens whole and sharded, and compare the inputs of attention. Ranks: every rank.

    A model that makes positions from the length of its input, or mixes neighbouring tokens, computes something else from a
    shard of a sequence, silently. Raises: StepError for such a model.
    """
    if not _may_run(model, inner, block):
        return
    whole = _shortened(args, kwargs, block, lambda start, dim: start)
    parts = _shortened(args, kwargs, block, block.part)
    plain, split = _Recorder(block.attention.original), _Recorder(_split_attention(block))
    _run(inner, whole, plain, block)
    _run(inner, parts, split, block)
    worst = 0.0
    for one, other in zip(plain.seen, split.seen, strict=True):
        for expected, mine in zip(one, other, strict=True):
            worst = max(worst, _difference(expected, mine, block))
    if worst > _TOLERANCE:
        raise StepError(
            f"{type(inner).__name__} receives no positions in this context-parallel block, and queries, keys or values of attention "
            f"differ between parts of a sequence and the whole sequence (by {worst:.0%}): it computes positions from the length of its "
            "input, or mixes neighbouring tokens outside attention. Pass the positions to the model and to the block as a buffer: "
            "context_parallel([tokens, labels, positions], [1, 1, 1]) with positions = torch.arange(length).expand(batch, -1), or set "
            "cp_size=1."
        )


def check_labels(
    model: nn.Module, inner: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], block: OpenBlock, name: str
) -> None:
    """Change the first label of each shard, and check that the model's loss changes. Ranks: every rank.

    A model that shifts its labels itself ignores the first label of a shard, and pairs labels with tokens of another chunk.
    Raises: StepError for such a model.
    """
    given = block.whole(kwargs.get(name))
    if given is None or given[0].is_floating_point() or not _may_run(model, inner, block):
        return
    some, named = _shortened(args, kwargs, block, block.part)
    labels, dim, most = named[name], given[1], int(given[0].max())
    found: list[float] = []
    for value in (0, most):
        changed = labels.clone()
        changed.narrow(dim, 0, 1).fill_(value)
        out = _run(inner, (some, {**named, name: changed}), _split_attention(block), block)
        found += [float(one) for one in tensors(out) if one.numel() == 1 and one.is_floating_point()][:1]
    if most > 0 and len(found) == 2 and found[0] == found[1]:
        raise StepError(
            f"{type(inner).__name__} returns a loss that the first label of this rank's part of {name!r} does not change: it shifts "
            "labels in its forward, so tokens at the ends of parts would be lost or mixed up. Shift the labels before the block "
            "and compute the loss from the logits, with torch.nn.functional.cross_entropy()."
        )


def _may_run(model: nn.Module, inner: nn.Module, block: OpenBlock) -> bool:
    """Return whether the model can be called additional times, with fewer tokens."""
    length = block.layout.num_chunks * _PER_CHUNK
    engine = model is not inner and not isinstance(model, DistributedDataParallel)
    return not engine and all(whole.shape[dim] >= length for _, whole, dim in block.buffers)


def _split_attention(block: OpenBlock) -> SequenceAttention:
    lengths = frozenset({block.layout.num_chunks * _PER_CHUNK // block.layout.ranks})
    made = replace(
        block.attention, lengths=lengths, masks=MaskReader(block.layout), padded=None, packed=None, hidden=None
    )
    made.begin, made.lenient = lambda: (False, None), block.attention.packed is not None
    return made


def _run(
    inner: nn.Module, given: tuple[tuple[Any, ...], dict[str, Any]], attention: Attention, block: OpenBlock
) -> Any:
    args, kwargs = given
    with torch.no_grad(), _as_evaluated(inner, block), AttentionPatch().replaced(attention):
        return inner.forward(*args, **kwargs)


@dataclass(slots=True)
class _Recorder:
    """Attention function that records its queries, keys and values."""

    attention: Callable[..., Tensor]
    seen: list[tuple[Tensor, Tensor, Tensor]] = field(default_factory=list)

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        self.seen.append((query, key, value))
        return self.attention(query, key, value, *args, **kwargs)


def _shortened(
    args: tuple[Any, ...], kwargs: dict[str, Any], block: OpenBlock, cut: Callable[[Tensor, int], Tensor]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    length = block.layout.num_chunks * _PER_CHUNK

    def short(tensor: Tensor) -> Tensor:
        found = block.whole(tensor)
        return tensor if found is None else cut(found[0].narrow(found[1], 0, length), found[1])

    made: tuple[tuple[Any, ...], dict[str, Any]] = map_tensors(short, (args, kwargs))
    return made


def _difference(whole: Tensor, part: Tensor, block: OpenBlock) -> float:
    """Return the relative difference between whole sequences and the gathered shards."""
    dim = part.ndim - 2
    joined = collect(part, dim, block.attention.sharing.group)
    chunks = joined.chunk(block.layout.num_chunks, dim)
    ordered = torch.cat([chunks[place] for place in block.layout.order()], dim).float()
    return float((ordered - whole.float()).norm() / whole.float().norm().clamp(min=1e-20))


@contextmanager
def _as_evaluated(model: nn.Module, block: OpenBlock) -> Iterator[None]:
    """Context manager that turns dropout off and restores random state and training modes afterwards."""
    device = block.buffers[0][0].device
    modes = [(part, part.training) for part in model.modules()]
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        model.eval()
        try:
            yield
        finally:
            for part, training in modes:
                part.training = training
