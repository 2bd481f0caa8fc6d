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
from hasten.state.run_state import RunObjects, named_buffers, pack_component

log = get_logger(__name__)

_BUFFERS: Final = "own_buffers"
# words hashed at a time: their products take eight times the memory
_WORDS_PER_BLOCK: Final = 1 << 22


def with_own_state(
    tree: StateTree,
    run_objects: RunObjects,
    agreement: Agreement,
    loop_position: LoopPosition,
) -> StateTree:
    """Return the tree with registered objects and buffers that differ between ranks saved per rank.

    Ranks: every rank. Schedulers and options of optimizers are those of rank 0: a difference is logged, because replicas that take different
    steps drift apart.
    """
    digests: dict[str, str] = {}
    for component_name, component in tree.components.items():
        if component.kind in ("scheduler", "object") and not component.sliced:
            digests[component_name] = _digest_component(component)
    for index, optimizer in enumerate(run_objects.objects.optimizers):
        group_options = []
        for group in optimizer.param_groups:
            group_options.append(
                {
                    state_key: group[state_key]
                    for state_key in group
                    if state_key != "params"
                }
            )
        digests[f"options of optimizer {index}"] = _digest_component(
            pack_component(group_options, "options")
        )
    named_values = dict(
        named_buffers(run_objects.plain_models(), loop_position.buffers)
    )
    buffer_digests = {
        state_key: fingerprint_tensor(buffer)
        for state_key, buffer in named_values.items()
    }
    digests_of_ranks: list[tuple[dict[str, str], dict[str, str]]] = agreement.share(
        (digests, buffer_digests)
    )
    _, first_buffer_digests = digests_of_ranks[0]
    components = dict(tree.components)
    differing_steps = []
    for component_name in _differing_names(
        [rank_digests for rank_digests, _ in digests_of_ranks]
    ):
        if component_name in components and components[component_name].kind == "object":
            components[component_name] = replace(
                components[component_name], per_rank=True
            )
        else:
            differing_steps.append(component_name)
    if any(
        rank_digests != first_buffer_digests for _, rank_digests in digests_of_ranks
    ):
        own_buffers = {}
        for state_key, buffer in named_values.items():
            if buffer_digests[state_key] != first_buffer_digests.get(state_key):
                own_buffers[state_key] = buffer
        components[_BUFFERS] = Component(own_buffers, None, "buffers", per_rank=True)
    if differing_steps:
        log.warning(
            "ranks disagree on %s. Replicas that take different steps drift apart; a cause is a scheduler that is stepped with "
            "a metric of each rank's own (ReduceLROnPlateau): reduce the metric first (accelerator.reduce). The state of rank 0 is saved.",
            ", ".join(differing_steps),
        )
    return StateTree(components)


def _differing_names(digests_of_ranks: Sequence[Mapping[str, str]]) -> list[str]:
    """Return the names of the states that are not the same on all ranks."""
    differing_names = []
    for name, digest in digests_of_ranks[0].items():
        if any(rank_digests.get(name) != digest for rank_digests in digests_of_ranks):
            differing_names.append(name)
    return differing_names


def _digest_component(component: Component) -> str:
    tensor_digests = {
        tensor_name: fingerprint_tensor(tensor)
        for tensor_name, tensor in component.tensors.items()
        if not isinstance(tensor, Slice)
    }
    component_text = json.dumps(
        [component.data, tensor_digests], sort_keys=True, default=str
    )
    return hashlib.blake2b(component_text.encode(), digest_size=16).hexdigest()


@torch.no_grad()
def fingerprint_tensor(tensor: Tensor) -> str:
    """Return a digest of dtype, shape and every bit, computed on the tensor's device: only two numbers are transferred.

    Two sums of all 32-bit words, one of them weighted by position, modulo 2**64: enough to distinguish states, not to
    withstand deliberate collisions.
    """
    flat_bytes = as_bytes(tensor.detach().contiguous())
    # an unaligned slice of bytes, which cannot be viewed as words
    if flat_bytes.storage_offset() % 4:
        flat_bytes = flat_bytes.clone()
    words = flat_bytes[: flat_bytes.numel() // 4 * 4].view(torch.int32)
    plain_sum = weighted_sum = torch.zeros(
        (), dtype=torch.int64, device=flat_bytes.device
    )
    for start in range(0, words.numel(), _WORDS_PER_BLOCK):
        word_block = words[start : start + _WORDS_PER_BLOCK].to(torch.int64)
        word_indices = torch.arange(
            start, start + word_block.numel(), device=flat_bytes.device
        )
        plain_sum = plain_sum + word_block.sum()
        weighted_sum = (
            weighted_sum + (word_block * (word_indices * 0x9E3779B1 + 1)).sum()
        )
    tail_bytes = flat_bytes[flat_bytes.numel() // 4 * 4 :].tolist()
    return f"{tensor.dtype}{tuple(tensor.shape)}{int(plain_sum):x}/{int(weighted_sum):x}/{tail_bytes}"
