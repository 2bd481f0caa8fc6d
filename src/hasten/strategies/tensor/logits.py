"""Loss parallelism: logits split over ranks along the vocabulary, and their cross entropy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from hasten.modules.lazy_logits import leaves_last
from hasten.strategies.tensor.ops import gather

# Any in this file: arguments of torch's functions, and its untyped autograd.Function.


class _SplitTokenLosses(torch.autograd.Function):
    """Cross entropy of each row from this rank's columns of the logits; equal on every rank."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, target: Tensor, smoothing: float, group: dist.ProcessGroup) -> Tensor:
        width, size = part.shape[-1], part.shape[-1] * group.size()
        largest = part.amax(-1)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
        local = target - group.rank() * width
        mine = (local >= 0) & (local < width)
        local = local.clamp(0, width - 1)
        picked = part.gather(-1, local.unsqueeze(-1)).squeeze(-1).masked_fill(~mine, 0)
        sums = torch.stack([(part - largest.unsqueeze(-1)).exp().sum(-1), picked, part.sum(-1)])
        dist.all_reduce(sums, group=group)
        lse = sums[0].log() + largest
        ctx.save_for_backward(part, lse, local, mine)
        ctx.smoothing, ctx.size = smoothing, size
        return lse - (1 - smoothing) * sums[1] - smoothing * sums[2] / size

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        part, lse, local, mine = ctx.saved_tensors
        made = (part - lse.unsqueeze(-1)).exp() - ctx.smoothing / ctx.size
        picked = -(1 - ctx.smoothing) * mine.to(made.dtype)
        made.scatter_add_(-1, local.unsqueeze(-1), picked.unsqueeze(-1))
        return made * grad.unsqueeze(-1), None, None, None


def _cross_entropy(
    logits: VocabularyParts,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """Compute torch's cross entropy, from shards of the vocabulary if it has the form used by language models."""
    part, group = logits.part, logits.group
    by_class = weight is not None or size_average is not None or reduce is not None or target.is_floating_point()
    if by_class or part.ndim != 2:
        options: dict[str, Any] = {"ignore_index": ignore_index, "label_smoothing": label_smoothing}
        return F.cross_entropy(
            logits.whole(), target, weight, size_average, reduce=reduce, reduction=reduction, **options
        )
    kept = target != ignore_index
    losses: Tensor = _SplitTokenLosses.apply(  # type: ignore[no-untyped-call]  # torch leaves it untyped
        part.float(), target.masked_fill(~kept, 0), label_smoothing, group
    )
    losses = losses.masked_fill(~kept, 0)
    if reduction == "mean":
        return losses.sum() / kept.sum()
    return losses.sum() if reduction == "sum" else losses


_ROWS: Final = frozenset(
    getattr(Tensor, name)
    for name in ("float", "double", "half", "bfloat16", "to", "type", "contiguous", "clone", "detach", "cpu", "cuda")
)
"""Methods that leave every element in place."""
_SHAPES: Final = frozenset({Tensor.view, Tensor.reshape, Tensor.flatten, torch.reshape, torch.flatten})
"""Functions that may merge the dimensions before the vocabulary."""
_ATTRIBUTES: Final = frozenset(
    {
        *(
            getattr(Tensor, name).__get__
            for name in ("requires_grad", "grad_fn", "is_leaf", "device", "dtype", "layout")
        ),
        *(getattr(Tensor, name) for name in ("register_hook", "is_floating_point", "backward", "retain_grad")),
    }
)
"""Attributes and methods with the same result for a shard and for the whole."""
_SIZES: Final = frozenset({Tensor.shape.__get__, Tensor.size, Tensor.numel, Tensor.nelement, Tensor.__len__})  # type: ignore[attr-defined]  # a descriptor


class VocabularyParts(Tensor):
    """Logits with the shape of the whole tensor, of which this rank holds a shard of the last dimension.

    `cross_entropy` is computed from the shards; operations that need more gather them first, and return the same result as
    for the whole tensor.
    """

    part: Tensor
    group: dist.ProcessGroup

    @staticmethod
    def around(part: Tensor, group: dist.ProcessGroup) -> VocabularyParts:
        """Create logits from this rank's shard, differentiable."""
        with torch._C.DisableTorchFunctionSubclass():
            made = part.as_subclass(VocabularyParts)
        made.part, made.group = part, group
        return made

    def whole(self) -> Tensor:
        """Return the logits gathered over the vocabulary. Ranks: the group."""
        return gather(self.part, -1, self.group)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else kwargs.get("input")
        if isinstance(first, VocabularyParts):
            if func is F.cross_entropy:
                return _cross_entropy(*args, **kwargs)
            with torch._C.DisableTorchFunctionSubclass():
                if func in _ATTRIBUTES:
                    return func(first.part, *args[1:], **kwargs)
                if func in _SIZES:
                    return func(first._shaped(), *args[1:], **kwargs)
                rows = first._by_rows(func, args, kwargs)
            if rows is not None:
                return cls.around(rows, first.group)
        whole_args, whole_kwargs = _whole(args), _whole(kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*whole_args, **whole_kwargs)

    def _shaped(self) -> Tensor:
        """Return a meta tensor with the shape of the whole; call it where torch functions act on the shard."""
        part, group = self.part, self.group
        return torch.empty((*part.shape[:-1], part.shape[-1] * group.size()), device="meta", dtype=part.dtype)

    def _by_rows(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
        """Apply the function to the shard if it leaves the vocabulary dimension alone; return None otherwise."""
        part, width = self.part, self.part.shape[-1]
        if func in _ROWS:
            made: Tensor = func(part, *args[1:], **kwargs)
            return made
        if func is Tensor.__getitem__ and leaves_last(args[1], part.ndim):
            found: Tensor = part[args[1]]
            return found
        if func not in _SHAPES:
            return None
        shape = func(self._shaped(), *args[1:], **kwargs).shape
        size = width * self.group.size()
        return part.reshape(*shape[:-1], width) if shape and shape[-1] == size else None


def _whole(values: Any) -> Any:
    """Return the arguments with whole logits in place of shards."""
    if isinstance(values, VocabularyParts):
        return values.whole()
    if isinstance(values, list):
        return [_whole(value) for value in values]
    if isinstance(values, tuple):
        return tuple(_whole(value) for value in values)
    if isinstance(values, Mapping):
        return {key: _whole(value) for key, value in values.items()}
    return values
