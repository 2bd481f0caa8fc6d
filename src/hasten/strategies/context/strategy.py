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
from hasten.strategies.context.masks import (
    IGNORED,
    BufferFlags,
    MaskReader,
    inspect_buffers,
)
from hasten.strategies.context.ops import shard_of_rank
from hasten.strategies.context.sdpa import (
    AttentionPatch,
    ExchangeStrategy,
    SequenceAttention,
)
from hasten.strategies.context.sequence_plan import SequenceLayout


class SequenceShards:
    """Layout of a block's sequences over ranks, and the gathering of their shards."""

    def __init__(
        self, sequence_layout: SequenceLayout, rank: int, comm: ProcessGroupComm | None
    ) -> None:
        self._layout = sequence_layout
        self._rank = rank
        self._comm = comm

    def positions(self, length: int) -> Tensor:
        """Return the positions that this rank holds in a sequence of this length, in their order on the rank."""
        if self._comm is None:
            return torch.arange(length)
        self._layout.check(length, "the sequence")
        return torch.tensor(
            self._layout.positions_of(self._rank, length), device=self._comm.device
        )

    def gather(self, tensor: Tensor, dim: int = 1) -> Tensor:
        """Return the whole sequence in its original order, gathered from the ranks' shards along `dim`; differentiable.

        Ranks: the ranks that share the sequence.
        """
        if self._comm is None:
            return tensor
        return SequenceGroup(self._comm.group, self._layout).gather_sequence(
            tensor, dim % tensor.ndim
        )


class ContextParallel:
    """Sharding of a block's sequences over the context-parallel axis, with attention that spans the shards."""

    def __init__(
        self,
        parallelism: ParallelismConfig,
        ctx: ProcessContext,
        clock: StepClock,
        models: Callable[[], Iterable[nn.Module]],
    ) -> None:
        ranks = ctx.mesh.size(Axis.CP)
        handler = parallelism.cp_handler
        by_heads = parallelism.sp_size > 1 or handler.cp_comm_strategy == "ulysses"
        self._way: ExchangeStrategy = "ulysses" if by_heads else "allgather"
        self._clock = clock
        self._models = models
        self._layout = SequenceLayout(
            ranks, handler.load_balance and self._way != "ulysses"
        )
        self._rank = ctx.mesh.index(ctx.rank, Axis.CP)
        comm = ctx.groups(Axis.CP) if ranks > 1 else None
        self._comm = comm if isinstance(comm, ProcessGroupComm) else None
        self._patch = AttentionPatch()
        self._opened: OpenBlock | None = None

    def watch_model(self, model: nn.Module, inner: nn.Module) -> None:
        """Complete the arguments of the model's calls inside blocks, and refuse training calls outside of them."""
        if self._comm is not None:
            hook = CallHook(
                inner, is_trainable(inner), self._layout.ranks, lambda: self._opened
            )
            model.register_forward_pre_hook(hook, with_kwargs=True)

    @contextmanager
    def open_block(
        self,
        buffers: Sequence[Tensor],
        dims: Sequence[int],
        keep_sharded: Iterable[Tensor] = (),
        labels: Tensor | Literal["auto"] | None = "auto",
    ) -> Iterator[SequenceShards]:
        """Context manager in which each buffer holds this rank's shard along its dimension. Ranks: every rank.

        A loss backpropagated inside is weighted by this rank's share of the labels of the sequence.
        """
        sequence_comm = self._comm
        shards = SequenceShards(self._layout, self._rank, sequence_comm)
        if sequence_comm is None:
            yield shards
            return
        buffer_dims = self._check_buffers(list(buffers), list(dims))
        group = sequence_comm.group
        kept_buffer_ids = set(map(id, keep_sharded))
        whole_buffers = [(tensor.data, dim) for tensor, dim in buffer_dims]
        read_flags = inspect_buffers(whole_buffers)
        labels_index = self._index_of_labels(buffer_dims, labels)

        def begin_block() -> None:
            buffer_flags = read_flags()
            _refuse_packed(buffer_flags)
            index = labels_index
            if isinstance(labels, str):
                index = self._find_labels(whole_buffers, buffer_flags)
            if index is not None:
                self._weigh_loss(buffer_dims[index][0], whole_buffers[index][0])

        try:
            for tensor, dim in buffer_dims:
                tensor.data = shard_of_rank(tensor.data, dim, self._layout, self._rank)
            attention = SequenceAttention(
                self._patch.original_attention(),
                SequenceGroup(group, self._layout),
                self._way,
                frozenset(tensor.shape[dim] for tensor, dim in buffer_dims),
                MaskReader(self._layout),
                begin_block,
            )
            # nothing to wait for
            if all(whole_buffer.is_cpu for whole_buffer, _ in whole_buffers):
                attention.start()
            self._clock.weights.joined = True
            open_buffers = [
                (tensor, whole_buffer, dim)
                for (tensor, dim), (whole_buffer, _) in zip(
                    buffer_dims, whole_buffers, strict=True
                )
            ]
            self._opened = OpenBlock(
                self._layout,
                self._rank,
                open_buffers,
                attention,
                read_flags,
                self._weigh_loss,
            )
            with self._patch.replace_attention(attention):
                yield shards
            self._check_used(attention)
        finally:
            self._clock.weights.share, self._clock.weights.joined, self._opened = (
                None,
                False,
                None,
            )
            for (tensor, dim), (whole_buffer, _) in zip(
                buffer_dims, whole_buffers, strict=True
            ):
                if id(tensor) not in kept_buffer_ids:
                    _restore_buffer(tensor, whole_buffer, dim)

    def _check_buffers(
        self, buffers: list[Tensor], dims: list[int]
    ) -> list[tuple[Tensor, int]]:
        """Return each buffer once, with its dimension. Raises: ConfigError for buffers that cannot be sharded."""
        if not buffers or len(buffers) != len(dims):
            raise ConfigError(
                f"context_parallel() got {len(buffers)} buffers and {len(dims)} sequence dimensions; each buffer needs a dimension "
                "along which it is split. Pass the inputs of the model (tokens, positions, labels) and their sequence dimensions, such "
                "as ([tokens, labels], [1, 1])."
            )
        buffers_by_id: dict[int, tuple[Tensor, int]] = {}
        for buffer_index, (tensor, given_dim) in enumerate(
            zip(buffers, dims, strict=True)
        ):
            if not -tensor.ndim <= given_dim < tensor.ndim:
                raise ConfigError(
                    f"context_parallel(): buffer {buffer_index} of shape {tuple(tensor.shape)} has no dimension {given_dim} to split; pass its "
                    "sequence dimension."
                )
            dim = given_dim % tensor.ndim
            if tensor.requires_grad:
                raise ConfigError(
                    f"context_parallel(): buffer {buffer_index} requires gradients, which would be lost when it is replaced by a part of "
                    "itself. Pass only inputs and buffers; index parameters with sharded positions."
                )
            if buffers_by_id.setdefault(id(tensor), (tensor, dim))[1] != dim:
                raise ConfigError(
                    f"context_parallel(): buffer {buffer_index} is passed twice, with two dimensions; remove one."
                )
            self._layout.check(
                tensor.shape[dim],
                f"buffer {buffer_index} of shape {tuple(tensor.shape)}",
            )
            if tensor.shape[dim] // self._layout.ranks < 2:
                raise ConfigError(
                    f"context_parallel(): buffer {buffer_index} of shape {tuple(tensor.shape)} leaves each of "
                    f"{self._layout.ranks} ranks a single token, which attention cannot distinguish from decoding; use sequences of at "
                    f"least {2 * self._layout.ranks} tokens, or a smaller cp_size."
                )
        self._refuse_copied(buffers_by_id)
        return list(buffers_by_id.values())

    def _refuse_copied(self, buffers_by_id: dict[int, tuple[Tensor, int]]) -> None:
        ddp_models = [
            m
            for m in self._models()
            if isinstance(m, DistributedDataParallel) and m.broadcast_buffers
        ]
        for model in ddp_models:
            for buffer_name, buffer in model.module.named_buffers():
                if id(buffer) in buffers_by_id:
                    raise ConfigError(
                        f"context_parallel(): {buffer_name!r} is a buffer of {type(model.module).__name__}, and DDP copies buffers from rank 0 "
                        "before each forward, which would overwrite the parts of the other ranks. Pass "
                        "DistributedDataParallelKwargs(broadcast_buffers=False)."
                    )

    def _index_of_labels(
        self,
        buffer_dims: list[tuple[Tensor, int]],
        labels: Tensor | Literal["auto"] | None,
    ) -> int | None:
        """Return the index of the caller's labels, which determine the weight of this rank's loss; None without labels."""
        if not isinstance(labels, Tensor):
            return None
        for index, (tensor, _) in enumerate(buffer_dims):
            if tensor is labels:
                return index
        raise ConfigError(
            "context_parallel(labels=...) is not one of the buffers, so it would not be split; add it to the buffers with its sequence "
            "dimension."
        )

    def _find_labels(
        self, whole_buffers: list[tuple[Tensor, int]], buffer_flags: list[BufferFlags]
    ) -> int | None:
        """Return the index of the buffer with ignored labels, which determines the weight of this rank's loss; None if there is none."""
        label_indices = [
            buffer_index
            for buffer_index, flags in enumerate(buffer_flags)
            if flags.has_ignored_labels
        ]
        if any(
            not torch.equal(
                self._count_labels(*whole_buffers[label_index]),
                self._count_labels(*whole_buffers[label_indices[0]]),
            )
            for label_index in label_indices[1:]
        ):
            raise ConfigError(
                f"{len(label_indices)} buffers of context_parallel() hold labels of {IGNORED}, in different numbers, so it is unclear over "
                "which of them the loss is averaged. Pass it: context_parallel(..., labels=shift_labels)."
            )
        return label_indices[0] if label_indices else None

    def _count_labels(self, whole_labels: Tensor, dim: int) -> Tensor:
        """Return the number of labels in each chunk that the loss does not ignore."""
        chunks = whole_labels.chunk(self._layout.num_chunks, dim)
        return torch.stack([(chunk != IGNORED).sum() for chunk in chunks])

    def _weigh_loss(self, shard_labels: Tensor, all_labels: Tensor) -> None:
        """Weigh this rank's mean loss by its share of the labels; needs no collective, as each rank has all labels."""
        label_counts = torch.stack(
            [(shard_labels != IGNORED).sum(), (all_labels != IGNORED).sum()]
        ).to(torch.float32)
        self._clock.weights.share = torch.where(
            label_counts[1] == 0,
            label_counts[1],
            label_counts[0] * self._layout.ranks / label_counts[1],
        )

    def _check_used(self, attention: SequenceAttention) -> None:
        if attention.calls == 0:
            raise StepError(
                "no scaled_dot_product_attention was called inside the context-parallel block; a model with another attention "
                "implementation only attends within each rank's part of the sequence. Use "
                "torch.nn.functional.scaled_dot_product_attention (transformers: attn_implementation='sdpa'), or "
                "cp_size=1."
            )


def _refuse_packed(buffer_flags: list[BufferFlags]) -> None:
    if any(flags.restarts_positions for flags in buffer_flags):
        raise StepError(
            "the positions of this context-parallel block restart, so samples are packed into its sequences; samples would attend to each "
            "other over the ranks. Do not pack samples, or set cp_size=1."
        )


def _restore_buffer(tensor: Tensor, unsharded_data: Tensor, dim: int) -> None:
    """Make the tensor whole again; a backward that needs its shard then raises instead of using the whole tensor."""
    tensor.data = unsharded_data
    with torch.no_grad():
        # writes nothing, but increments the tensor's version
        tensor.narrow(dim, 0, 0).zero_()
