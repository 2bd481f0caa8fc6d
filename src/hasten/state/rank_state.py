"""State that differs between ranks: found by comparing digests; registered objects and buffers are then saved per rank."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

import torch
from torch import Tensor

from hasten.checkpoint.base import Component, Slice, StateTree
from hasten.checkpoint.store.disk import as_bytes
from hasten.comm.agreement import Agreement
from hasten.runtime.logs import get_logger
from hasten.state.loop_position import LoopPosition
from hasten.state.run_state import RunObjects, named_buffers, packed

log = get_logger(__name__)

_BUFFERS: Final = "own_buffers"
# words hashed at a time: their products take eight times the memory
_STRIDE: Final = 1 << 22


def with_own_state(
    tree: StateTree, parts: RunObjects, together: Agreement, position: LoopPosition
) -> StateTree:
    """Return the tree with registered objects and buffers that differ between ranks saved per rank.

    Ranks: every rank. Schedulers and options of optimizers are those of rank 0: a difference is logged, because replicas that take different
    steps drift apart.
    """
    digests: dict[str, str] = {}
    for name, component in tree.components.items():
        if component.kind in ("scheduler", "object") and not component.sliced:
            digests[name] = _digest(component)
    for index, optimizer in enumerate(parts.objects.optimizers):
        options = []
        for group in optimizer.param_groups:
            options.append({key: group[key] for key in group if key != "params"})
        digests[f"options of optimizer {index}"] = _digest(packed(options, "options"))
    buffers = dict(named_buffers(parts.plain_models(), position.buffers))
    buffer_digests = {key: fingerprint(buffer) for key, buffer in buffers.items()}
    digests_of_ranks: list[tuple[dict[str, str], dict[str, str]]] = together.share(
        (digests, buffer_digests)
    )
    _, first_buffer_digests = digests_of_ranks[0]
    components = dict(tree.components)
    steps = []
    for name in _differing_names([state for state, _ in digests_of_ranks]):
        if name in components and components[name].kind == "object":
            components[name] = replace(components[name], per_rank=True)
        else:
            steps.append(name)
    if any(state != first_buffer_digests for _, state in digests_of_ranks):
        own_buffers = {}
        for key, buffer in buffers.items():
            if buffer_digests[key] != first_buffer_digests.get(key):
                own_buffers[key] = buffer
        components[_BUFFERS] = Component(own_buffers, None, "buffers", per_rank=True)
    if steps:
        log.warning(
            "ranks disagree on %s. Replicas that take different steps drift apart; a cause is a scheduler that is stepped with "
            "a metric of each rank's own (ReduceLROnPlateau): reduce the metric first (accelerator.reduce). The state of rank 0 is saved.",
            ", ".join(steps),
        )
    return StateTree(components)


def _differing_names(digests_of_ranks: Sequence[Mapping[str, str]]) -> list[str]:
    """Return the names of the states that are not the same on all ranks."""
    names = []
    for name, digest in digests_of_ranks[0].items():
        if any(digests.get(name) != digest for digests in digests_of_ranks):
            names.append(name)
    return names


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
