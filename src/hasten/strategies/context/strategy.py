"""Context parallelism: a block in which each rank holds a shard of every sequence and attention spans the shards."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hasten.comm.process_group import ProcessGroupComm
from hasten.config.sections.parallel import ParallelismConfig
from hasten.errors import ConfigError, StepError
from hasten.optim.clock import StepClock
from hasten.runtime.context import ProcessContext
from hasten.runtime.mesh_plan import Axis
from hasten.strategies.base import is_trainable
from hasten.strategies.context.attention import SequenceGroup
from hasten.strategies.context.calls import CallHook, OpenBlock
from hasten.strategies.context.masks import IGNORED, Contents, MaskReader, PackedSamples, look
from hasten.strategies.context.ops import held_part
from hasten.strategies.context.sdpa import AttentionPatch, SequenceAttention, Way
from hasten.strategies.context.sequence_plan import SequenceLayout


class SequenceShards:
    """Layout of a block's sequences over ranks, and the gathering of their shards."""

    def __init__(self, layout: SequenceLayout, rank: int, comm: ProcessGroupComm | None) -> None:
        self._layout = layout
        self._rank = rank
        self._comm = comm

    def positions(self, length: int) -> Tensor:
        """Return the positions that this rank holds in a sequence of this length, in their order on the rank."""
        if self._comm is None:
            return torch.arange(length)
        self._layout.check(length, "the sequence")
        return torch.tensor(self._layout.positions(self._rank, length), device=self._comm.device)

    def gather(self, tensor: Tensor, dim: int = 1) -> Tensor:
        """Return the whole sequence in its original order, gathered from the ranks' shards along `dim`; differentiable.

        Ranks: the ranks that share the sequence.
        """
        if self._comm is None:
            return tensor
        return SequenceGroup(self._comm.group, self._layout).whole(tensor, dim % tensor.ndim)


class ContextParallel:
    """Sharding of a block's sequences over the context-parallel axis, with attention that spans the shards."""

    def __init__(
        self,
        config: ParallelismConfig,
        ctx: ProcessContext,
        clock: StepClock,
        models: Callable[[], Iterable[nn.Module]],
    ) -> None:
        ranks = ctx.mesh.size(Axis.CP)
        handler = config.cp_handler
        by_heads = config.sp_size > 1 or handler.cp_comm_strategy == "ulysses"
        self._way: Way = "ulysses" if by_heads else "allgather"
        self._clock = clock
        self._models = models
        self._layout = SequenceLayout(ranks, handler.load_balance and self._way != "ulysses")
        self._rank = ctx.mesh.index(ctx.rank, Axis.CP)
        comm = ctx.groups(Axis.CP) if ranks > 1 else None
        self._comm = comm if isinstance(comm, ProcessGroupComm) else None
        self._patch = AttentionPatch()
        self._opened: OpenBlock | None = None

    def follow(self, model: nn.Module, inner: nn.Module) -> None:
        """Complete the arguments of the model's calls inside blocks, and refuse training calls outside of them."""
        if self._comm is not None:
            hook = CallHook(inner, is_trainable(inner), self._layout.ranks, lambda: self._opened)
            model.register_forward_pre_hook(hook, with_kwargs=True)

    @contextmanager
    def block(
        self,
        buffers: Sequence[Tensor],
        dims: Sequence[int],
        keep_sharded: Iterable[Tensor] = (),
        labels: Tensor | Literal["auto"] | None = "auto",
    ) -> Iterator[SequenceShards]:
        """Context manager in which each buffer holds this rank's shard along its dimension. Ranks: every rank.

        A loss backpropagated inside is weighted by this rank's share of the labels of the sequence.
        """
        comm = self._comm
        shards = SequenceShards(self._layout, self._rank, comm)
        if comm is None:
            yield shards
            return
        chosen = self._checked(list(buffers), list(dims))
        group = comm.group
        kept = {id(tensor) for tensor in keep_sharded}
        wholes = [(tensor.data, dim) for tensor, dim in chosen]
        read, counted = look(wholes), self._named(chosen, labels)

        def begin() -> tuple[bool, PackedSamples | None]:
            contents = read()
            decisive = self._found(chosen, wholes, contents) if isinstance(labels, str) else counted
            self._clock.weights.share = None if decisive is None else self._share(decisive, comm)
            packed = self._packed(wholes, contents)
            return contents.padded and packed is None, packed

        try:
            for tensor, dim in chosen:
                tensor.data = held_part(tensor.data, dim, self._layout, self._rank)
            attention = SequenceAttention(
                self._patch.original(),
                SequenceGroup(group, self._layout),
                self._way,
                frozenset(tensor.shape[dim] for tensor, dim in chosen),
                MaskReader(self._layout),
                begin,
            )
            if all(whole.is_cpu for whole, _ in wholes):  # nothing to wait for
                attention.start()
            self._clock.weights.joined = True
            held = [(tensor, whole, dim) for (tensor, dim), (whole, _) in zip(chosen, wholes, strict=True)]
            self._opened = OpenBlock(self._layout, self._rank, held, attention, lambda: read().counting, self._weigh)
            with self._patch.replaced(attention):
                yield shards
            self._check_used(attention)
        finally:
            self._clock.weights.share, self._clock.weights.joined, self._opened = None, False, None
            for (tensor, dim), (whole, _) in zip(chosen, wholes, strict=True):
                if id(tensor) not in kept:
                    _restore(tensor, whole, dim)

    def _checked(self, buffers: list[Tensor], dims: list[int]) -> list[tuple[Tensor, int]]:
        """Return each buffer once, with its dimension. Raises: ConfigError for buffers that cannot be sharded."""
        if not buffers or len(buffers) != len(dims):
            raise ConfigError(
                f"context_parallel() got {len(buffers)} buffers and {len(dims)} sequence dimensions; each buffer needs a dimension "
                "along which it is split. Pass the inputs of the model (tokens, positions, labels) and their sequence dimensions, such "
                "as ([tokens, labels], [1, 1])."
            )
        known: dict[int, tuple[Tensor, int]] = {}
        for number, (tensor, given) in enumerate(zip(buffers, dims, strict=True)):
            if not -tensor.ndim <= given < tensor.ndim:
                raise ConfigError(
                    f"context_parallel(): buffer {number} of shape {tuple(tensor.shape)} has no dimension {given} to split; pass its "
                    "sequence dimension."
                )
            dim = given % tensor.ndim
            if tensor.requires_grad:
                raise ConfigError(
                    f"context_parallel(): buffer {number} requires gradients, which would be lost when it is replaced by a part of "
                    "itself. Pass only inputs and buffers; index parameters with sharded positions."
                )
            if known.setdefault(id(tensor), (tensor, dim))[1] != dim:
                raise ConfigError(
                    f"context_parallel(): buffer {number} is passed twice, with two dimensions; remove one."
                )
            self._layout.check(tensor.shape[dim], f"buffer {number} of shape {tuple(tensor.shape)}")
            if tensor.shape[dim] // self._layout.ranks < 2:
                raise ConfigError(
                    f"context_parallel(): buffer {number} of shape {tuple(tensor.shape)} leaves each of "
                    f"{self._layout.ranks} ranks a single token, which attention cannot distinguish from decoding; use sequences of at "
                    f"least {2 * self._layout.ranks} tokens, or a smaller cp_size."
                )
        self._refuse_copied(known)
        return list(known.values())

    def _refuse_copied(self, known: dict[int, tuple[Tensor, int]]) -> None:
        copying = [m for m in self._models() if isinstance(m, DistributedDataParallel) and m.broadcast_buffers]
        for model in copying:
            for name, buffer in model.module.named_buffers():
                if id(buffer) in known:
                    raise ConfigError(
                        f"context_parallel(): {name!r} is a buffer of {type(model.module).__name__}, and DDP copies buffers from rank 0 "
                        "before each forward, which would overwrite the parts of the other ranks. Pass "
                        "DistributedDataParallelKwargs(broadcast_buffers=False)."
                    )

    def _named(self, chosen: list[tuple[Tensor, int]], labels: Tensor | Literal["auto"] | None) -> Tensor | None:
        """Return the caller's labels, which determine the weight of this rank's loss; None without labels."""
        if not isinstance(labels, Tensor):
            return None
        if any(tensor is labels for tensor, _ in chosen):
            return labels
        raise ConfigError(
            "context_parallel(labels=...) is not one of the buffers, so it would not be split; add it to the buffers with its sequence "
            "dimension."
        )

    def _found(
        self, chosen: list[tuple[Tensor, int]], wholes: list[tuple[Tensor, int]], contents: Contents
    ) -> Tensor | None:
        """Return the buffer with ignored labels, which determines the weight of this rank's loss; None if there is none."""
        found = [number for number, ignoring in enumerate(contents.ignoring) if ignoring]
        if any(not torch.equal(self._real(*wholes[n]), self._real(*wholes[found[0]])) for n in found[1:]):
            raise ConfigError(
                f"{len(found)} buffers of context_parallel() hold labels of {IGNORED}, in different numbers, so it is unclear over "
                "which of them the loss is averaged. Pass it: context_parallel(..., labels=shift_labels)."
            )
        return chosen[found[0]][0] if found else None

    def _packed(self, wholes: list[tuple[Tensor, int]], contents: Contents) -> PackedSamples | None:
        """Return the samples packed into the sequences, by the positions that restart; None if no buffer has such positions."""
        found = [whole for whole, one in zip(wholes, contents.restarting, strict=True) if one]
        if not found:
            return None
        positions, dim = found[0]
        if positions.ndim > 2 or dim != positions.ndim - 1 or any(not torch.equal(positions, one) for one, _ in found):
            raise StepError(
                f"{len(found)} buffers of this context-parallel block count up from 0 and restart, like the positions of several samples "
                f"packed into one sequence, and their shapes are {', '.join(str(tuple(one.shape)) for one, _ in found)}; which samples "
                "attend to themselves is unclear. Pass one buffer of positions, (batch, length), or set cp_size=1."
            )
        return PackedSamples(positions, self._layout, self._rank)

    def _real(self, whole: Tensor, dim: int) -> Tensor:
        """Return the number of labels in each chunk that the loss does not ignore."""
        chunks = whole.chunk(self._layout.num_chunks, dim)
        return torch.stack([(chunk != IGNORED).sum() for chunk in chunks])

    def _share(self, counted: Tensor, comm: ProcessGroupComm) -> Tensor:
        """Return this rank's share of the labels times the number of ranks: the weight of its mean loss. Ranks: the sequence's."""
        mine = (counted != IGNORED).sum().to(comm.device, torch.float32)
        total = comm.all_reduce(mine.clone())
        return torch.where(total == 0, total, mine * self._layout.ranks / total)

    def _weigh(self, mine: Tensor, every: Tensor) -> None:
        """Weigh this rank's mean loss by its share of the labels; needs no collective, as each rank has all labels."""
        counts = torch.stack([(mine != IGNORED).sum(), (every != IGNORED).sum()]).to(torch.float32)
        self._clock.weights.share = torch.where(counts[1] == 0, counts[1], counts[0] * self._layout.ranks / counts[1])

    def _check_used(self, attention: SequenceAttention) -> None:
        if attention.calls == 0:
            raise StepError(
                "no scaled_dot_product_attention was called inside the context-parallel block; a model with another attention "
                "implementation only attends within each rank's part of the sequence. Use "
                "torch.nn.functional.scaled_dot_product_attention (transformers: attn_implementation='sdpa'), or "
                "cp_size=1."
            )


def _restore(tensor: Tensor, whole: Tensor, dim: int) -> None:
    """Make the tensor whole again; a backward that needs its shard then raises instead of using the whole tensor."""
    tensor.data = whole
    with torch.no_grad():
        tensor.narrow(dim, 0, 0).zero_()  # writes nothing, but increments the tensor's version
