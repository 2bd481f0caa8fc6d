"""Lets megatron-core run on the CPU, for tests: its calls of torch.cuda answer as if the CPU were a CUDA device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Final
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

from hasten.extensions.megatron.package import import_megatron

CPU: Final = torch.device("cpu")


class Nothing:
    """A stream or an event of a device that works in order."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., Nothing]:
        return lambda *args, **kwargs: self

    def __enter__(self) -> Nothing:
        return self

    def __exit__(self, *error: object) -> None:
        return None


class OnCPU(TorchFunctionMode):
    """Takes "cuda" for the CPU wherever torch is given a device, and names CPU tensors as CUDA's."""

    def __torch_function__(
        self,
        function: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if _on_cuda(kwargs.get("device")):
            kwargs["device"] = CPU
        kwargs.pop("pin_memory", None)
        if function is torch.Tensor.cuda:
            return args[0]
        if function is torch.Tensor.to and len(args) > 1 and _on_cuda(args[1]):
            args = (args[0], CPU, *args[2:])
        result = function(*args, **kwargs)
        if function is torch.Tensor.type and len(args) == 1 and not kwargs:
            return result.replace("torch.", "torch.cuda.")
        return result


def _on_cuda(device: object) -> bool:
    return isinstance(device, (str, torch.device)) and str(device).startswith("cuda")


def _counted(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Numbers of tokens where the processor reads them, which megatron-core moves only from CUDA devices."""
    return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor


def _all_gather(
    even: Any,
    outputs: list[torch.Tensor],
    local_tensor: torch.Tensor,
    group: Any = None,
    **kwargs: Any,
) -> Any:
    """all_gather() of tensors of different lengths, which NCCL has and gloo has not."""
    if len({tuple(tensor.shape) for tensor in outputs}) == 1:
        return even(outputs, local_tensor, group=group, **kwargs)
    for rank, output in enumerate(outputs):
        if rank == dist.get_rank(group):
            output.copy_(local_tensor)
        dist.broadcast(output, dist.get_global_rank(group, rank), group=group)
    return None


def _reduce_scatter(
    even: Any,
    output: torch.Tensor,
    shards: list[torch.Tensor],
    group: Any = None,
    **kwargs: Any,
) -> Any:
    """reduce_scatter() likewise."""
    if len({tuple(tensor.shape) for tensor in shards}) == 1:
        return even(output, shards, group=group, **kwargs)
    for rank, shard in enumerate(shards):
        total = shard.clone()
        dist.all_reduce(total, group=group)
        if rank == dist.get_rank(group):
            output.copy_(total)
    return None


@contextmanager
def megatron_on_cpu() -> Iterator[None]:
    """A block in which megatron-core trains on the CPU; torch is as before after it."""
    stand_ins: dict[str, Any] = {
        "current_device": lambda: CPU,
        "synchronize": lambda *args, **kwargs: None,
        "current_stream": lambda *args, **kwargs: Nothing(),
        "default_stream": lambda *args, **kwargs: Nothing(),
        "stream": lambda stream: Nothing(),
        "Stream": Nothing,
        "Event": Nothing,
        "empty_cache": lambda: None,
        "memory_allocated": lambda *args: 0,
        "manual_seed": torch.manual_seed,
        "get_rng_state": lambda *args, **kwargs: torch.get_rng_state(),
        "set_rng_state": lambda state, *args, **kwargs: torch.set_rng_state(state),
    }
    with ExitStack() as stack:
        for name, stand_in in stand_ins.items():
            stack.enter_context(patch.object(torch.cuda, name, stand_in))
        stack.enter_context(
            patch.object(torch.nn.Module, "cuda", lambda module, *args: module)
        )
        random = import_megatron("tensor_parallel.random")
        stack.enter_context(
            patch.object(
                random,
                "_get_cuda_rng_state",
                lambda *args, **kwargs: torch.get_rng_state(),
            )
        )
        stack.enter_context(
            patch.object(
                random,
                "_set_cuda_rng_state",
                lambda state, *args, **kwargs: torch.set_rng_state(state),
            )
        )
        tokens = import_megatron("transformer.moe.token_dispatcher")
        stack.enter_context(patch.object(tokens, "maybe_move_tensor_to_cpu", _counted))
        for name, stand_in in (
            ("all_gather", _all_gather),
            ("reduce_scatter", _reduce_scatter),
        ):
            stack.enter_context(
                patch.object(dist, name, partial(stand_in, getattr(dist, name)))
            )
        stack.enter_context(OnCPU())
        yield
