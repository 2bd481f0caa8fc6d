"""Sources of a sharded model's weights: every rank, rank 0 alone, a function of the user, or a later load."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Iterator
from enum import StrEnum

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hasten.checkpoint.format.formats import dtensor_slice
from hasten.config.sections.parallel import FullyShardedDataParallelPlugin
from hasten.errors import MismatchError, PrepareError
from hasten.runtime.context import ProcessContext

log = logging.getLogger(__name__)


class WeightSource(StrEnum):
    """Ranks that hold a model's weights before it is sharded."""

    EVERYONE = "everyone"
    RANK_0 = "rank 0"
    NO_RANK = "no rank"


def source_of(
    model: nn.Module,
    fsdp_config: FullyShardedDataParallelPlugin,
    ctx: ProcessContext,
    *,
    buffers: bool = True,
) -> WeightSource:
    """Return the ranks that have the weights, after a check that every rank built the same model.

    `buffers=False` skips the check of meta buffers, which an engine does not need.
    Ranks: every rank. Raises: MismatchError with the difference; PrepareError if rank 0 lacks weights that others have.
    """
    meta_names = []
    for tensor_name, tensor in named_tensors(model):
        if tensor.is_meta:
            meta_names.append(tensor_name)
    if ctx.world.size > 1:
        _compare_models(model, ctx)
        names_by_rank: list[list[str]] = ctx.world.all_gather_object(meta_names)
    else:
        names_by_rank = [meta_names]
    if not any(names_by_rank):
        return WeightSource.EVERYONE
    if names_by_rank[0] and any(
        rank_names != names_by_rank[0] for rank_names in names_by_rank
    ):
        rank = next(
            rank
            for rank, rank_names in enumerate(names_by_rank)
            if rank_names != names_by_rank[0]
        )
        raise PrepareError(
            f"rank 0 built {type(model).__name__} with {len(names_by_rank[0])} tensors on the meta device, rank {rank} with "
            f"{len(names_by_rank[rank])}; weights that are missing on some ranks are sent by rank 0. Build the model with weights "
            "on rank 0, or on meta everywhere."
        )
    if names_by_rank[0]:
        if buffers:
            _refuse_lost_buffers(model, fsdp_config)
        return WeightSource.NO_RANK
    if not fsdp_config.sync_module_states:
        raise PrepareError(
            f"only some ranks built {type(model).__name__} with weights, and fsdp.sync_module_states=False prevents rank 0 from "
            "broadcasting them. Set sync_module_states=True, or build the weights on every rank."
        )
    return WeightSource.RANK_0


def _compare_models(model: nn.Module, ctx: ProcessContext) -> None:
    tensor_lines = []
    for tensor_name, tensor in named_tensors(model):
        tensor_lines.append(
            f"{tensor_name} {tuple(tensor.shape)} {tensor.dtype} {tensor.requires_grad}"
        )
    digest = hashlib.blake2b(
        "\n".join(tensor_lines).encode(), digest_size=16
    ).hexdigest()
    digests = ctx.world.all_gather_object(digest)
    if len(set(digests)) == 1:
        return
    lines_by_rank: list[list[str]] = ctx.world.all_gather_object(tensor_lines)
    differing_rank = next(
        rank
        for rank, tensor_lines in enumerate(lines_by_rank)
        if tensor_lines != lines_by_rank[0]
    )
    first_line, other_line = (
        next(iter(sorted(set(lines_by_rank[a]) - set(lines_by_rank[b]))), "nothing")
        for a, b in ((0, differing_rank), (differing_rank, 0))
    )
    raise MismatchError(
        f"rank 0 and rank {differing_rank} built different {type(model).__name__}s, whose shards would not fit together: rank 0 "
        f"has {first_line}, rank {differing_rank} has {other_line}. Build the same model on every rank."
    )


def _refuse_lost_buffers(
    model: nn.Module, fsdp_config: FullyShardedDataParallelPlugin
) -> None:
    lost_buffers = {
        buffer_name for buffer_name, buffer in model.named_buffers() if buffer.is_meta
    } - set(model.state_dict())
    if lost_buffers and fsdp_config.param_init_fn is None:
        raise PrepareError(
            f"buffer {sorted(lost_buffers)[0]!r} was built on the meta device and is not saved with the model's weights, so it would not be "
            "initialized. Pass FullyShardedDataParallelPlugin(param_init_fn=...) that computes it, or "
            "create this buffer on a real device."
        )


def named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield each parameter and buffer once."""
    yield from model.named_parameters()
    yield from model.named_buffers()


def copy_from_rank_0(model: nn.Module, ctx: ProcessContext) -> None:
    """Broadcast parameters and buffers from rank 0, so that every rank takes its shard from the same model."""
    if ctx.world.size == 1:
        return
    for _, tensor in named_tensors(model):
        # shards of split layers were already equal
        if not tensor.is_meta and not isinstance(tensor, DTensor):
            tensor.data.copy_(ctx.world.broadcast(tensor.data))


def copy_tensors(tensors: Iterable[Tensor], ctx: ProcessContext) -> None:
    """Broadcast tensors from rank 0 in place. Ranks: every rank, with as many tensors."""
    for tensor in tensors if ctx.world.size > 1 else ():
        tensor.copy_(ctx.world.broadcast(tensor))


@torch.no_grad()
def scatter_from_rank_0(
    model: nn.Module, unsharded_tensors: dict[str, Tensor], ctx: ProcessContext
) -> None:
    """Fill the shards of all ranks from the whole tensors of rank 0, with one tensor in memory at a time.

    Ranks: every rank; `wholes` is empty on all ranks but rank 0.
    """
    for tensor_name, target in named_tensors(model):
        unsharded_tensor = unsharded_tensors.pop(tensor_name, None)
        if unsharded_tensor is None:
            broadcast_source = torch.empty(
                target.shape, dtype=target.dtype, device=ctx.device
            )
        else:
            broadcast_source = unsharded_tensor
        whole_tensor = ctx.world.broadcast(broadcast_source.to(ctx.device))
        if isinstance(target, DTensor):
            own_slice = dtensor_slice(target)
            for dim, (start, size) in enumerate(
                zip(own_slice.offset, own_slice.data.shape, strict=True)
            ):
                whole_tensor = whole_tensor.narrow(dim, start, size)
            own_slice.data.copy_(whole_tensor)
        else:
            target.copy_(whole_tensor)


def allocate_meta(model: nn.Module, device: torch.device) -> None:
    """Allocate this rank's shards of meta tensors; floating-point ones hold NaN until they are filled."""

    def allocate_tensor(tensor: Tensor) -> Tensor:
        if not tensor.is_meta:
            return tensor
        allocated = torch.empty_like(tensor, device=device)
        if allocated.is_floating_point():
            return allocated.fill_(torch.nan)
        return allocated

    if any(tensor.is_meta for _, tensor in named_tensors(model)):
        model._apply(allocate_tensor)  # type: ignore[no-untyped-call]  # torch leaves it untyped


def fill_by_function(
    model: nn.Module, fsdp_config: FullyShardedDataParallelPlugin
) -> None:
    """Fill meta parameters with the user's `param_init_fn`, or log that a load has to fill them."""
    if fsdp_config.param_init_fn is None:
        log.info(
            "%s was built on the meta device: its weights are nan until load_model() or load_state() is called",
            type(model).__name__,
        )
        return
    for module in model.modules():
        fsdp_config.param_init_fn(module)


def keep_rest_on_device(model: nn.Module, ctx: ProcessContext) -> None:
    """Move the tensors that FSDP does not manage (buffers and whole parameters) to the device."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device != ctx.device:
                module._buffers[name] = buffer.to(ctx.device)
    for parameter in model.parameters():
        if not isinstance(parameter, DTensor) and parameter.device != ctx.device:
            parameter.data = parameter.data.to(ctx.device)
