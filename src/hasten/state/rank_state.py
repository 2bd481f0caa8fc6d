"""State that differs between ranks: found by comparing digests and saved per rank; equal state is saved once."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor

from hasten.checkpoint.base import Component, Slice, StateTree
from hasten.checkpoint.reader import Checkpoint
from hasten.checkpoint.store.disk import as_bytes
from hasten.comm.agreement import Agreement
from hasten.errors import CorruptCheckpointError
from hasten.runtime.logs import get_logger
from hasten.state.loop_position import LoopPosition
from hasten.state.run_state import RunObjects, load_packed, named_buffers, packed

log = get_logger(__name__)

_COMPARED: Final = ("scheduler", "object")
OPTIONS: Final = "own_options"
_BUFFERS: Final = "own_buffers"
# words hashed at a time: their products take eight times the memory
_STRIDE: Final = 1 << 22


def with_own_state(
    tree: StateTree, parts: RunObjects, together: Agreement, position: LoopPosition
) -> StateTree:
    """Return the tree with state that differs between ranks saved per rank: schedulers, objects, options, buffers.

    Ranks: every rank. Schedulers and options that differ are logged, because replicas then take different steps.
    """
    states = {
        name: _digest(c)
        for name, c in tree.components.items()
        if c.kind in _COMPARED and not c.sliced
    }
    options = packed(
        [_options(optimizer) for optimizer in parts.objects.optimizers],
        "options",
        per_rank=True,
    )
    buffers = dict(named_buffers(parts.plain_models(), position.buffers))
    sums = {key: fingerprint(buffer) for key, buffer in buffers.items()}
    everyone: list[tuple[dict[str, str], str, dict[str, str]]] = together.share(
        (states, _digest(options), sums)
    )
    first_states, first_options, first_sums = everyone[0]
    made = dict(tree.components)
    own = [
        name
        for name in states
        if any(other.get(name) != first_states.get(name) for other, _, _ in everyone)
    ]
    for name in own:
        made[name] = replace(made[name], per_rank=True)
    if any(other != first_options for _, other, _ in everyone):
        made[OPTIONS] = options
    if any(other != first_sums for _, _, other in everyone):
        held = {
            key: buffer
            for key, buffer in buffers.items()
            if sums[key] != first_sums.get(key)
        }
        made[_BUFFERS] = Component(held, None, "buffers", per_rank=True)
    _tell([name for name in own if made[name].kind == "scheduler"], OPTIONS in made)
    return StateTree(made)


def _tell(schedulers: Sequence[str], options: bool) -> None:
    if not schedulers and not options:
        return
    what = ", ".join(
        [
            *schedulers,
            *(
                ["the options of the optimizers (learning rate, ...)"]
                if options
                else []
            ),
        ]
    )
    log.warning(
        "ranks disagree on %s. Replicas that take different steps drift apart; a cause is a scheduler that is stepped with "
        "a metric of each rank's own (ReduceLROnPlateau): reduce the metric first (accelerator.reduce). Saved as it is, "
        "for each rank.",
        what,
    )


# Any: options of the optimizer
def _options(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [
        {key: value for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]


def plan_options(
    checkpoint: Checkpoint,
    optimizers: Sequence[torch.optim.Optimizer],
    rank: int,
    world_size: int,
) -> list[list[Mapping[str, Any]]] | None:
    """Return this rank's options of every group of every optimizer; None if those of rank 0 apply to all.

    Raises: CorruptCheckpointError when they do not match these optimizers.
    """
    saved_world = checkpoint.manifest.world_size
    if saved_world != world_size:
        log.warning(
            "the options of the optimizers differed between the %d processes that saved %s; all %d now take those of rank 0",
            saved_world,
            checkpoint.folder,
            world_size,
        )
        return None
    saved = load_packed(checkpoint, OPTIONS, rank)
    wanted = [len(optimizer.param_groups) for optimizer in optimizers]
    lists = isinstance(saved, list) and all(
        isinstance(groups, list) for groups in saved
    )
    if not lists or [len(groups) for groups in saved] != wanted:
        raise CorruptCheckpointError(
            f"{checkpoint.folder}: {OPTIONS} does not hold the options of {wanted} parameter groups. Nothing was loaded; "
            "use another checkpoint."
        )
    if not all(
        isinstance(group, Mapping) and "params" not in group
        for groups in saved
        for group in groups
    ):
        raise CorruptCheckpointError(
            f"{checkpoint.folder}: {OPTIONS} holds something else. Nothing was loaded."
        )
    return list(saved)


def _digest(component: Component) -> str:
    tensors = {
        key: fingerprint(value)
        for key, value in component.tensors.items()
        if not isinstance(value, Slice)
    }
    text = json.dumps([component.data, tensors], sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


@torch.no_grad()
def fingerprint(tensor: Tensor) -> str:
    """Return a digest of dtype, shape and every bit, computed on the tensor's device: only two numbers are transferred.

    Two sums of all 32-bit words, one of them weighted by position, modulo 2**64: enough to distinguish states, not to
    withstand deliberate collisions.
    """
    flat = as_bytes(tensor.detach().contiguous())
    # an unaligned slice of bytes, which cannot be viewed as words
    if flat.storage_offset() % 4:
        flat = flat.clone()
    words = flat[: flat.numel() // 4 * 4].view(torch.int32)
    plain = weighted = torch.zeros((), dtype=torch.int64, device=flat.device)
    for start in range(0, words.numel(), _STRIDE):
        part = words[start : start + _STRIDE].to(torch.int64)
        place = torch.arange(start, start + part.numel(), device=flat.device)
        plain = plain + part.sum()
        weighted = weighted + (part * (place * 0x9E3779B1 + 1)).sum()
    tail = flat[flat.numel() // 4 * 4 :].tolist()
    return f"{tensor.dtype}{tuple(tensor.shape)}{int(plain):x}/{int(weighted):x}/{tail}"
