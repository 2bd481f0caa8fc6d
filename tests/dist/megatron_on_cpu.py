"""Lets megatron-core run on the CPU, for tests: its calls of torch.cuda answer as if the CPU were a CUDA device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final
from unittest.mock import patch

import torch
from torch.overrides import TorchFunctionMode

from hasten.strategies.megatron_engine import package

CPU: Final = torch.device("cpu")


class Nothing:
    """A stream or an event of a device that works in order."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **kwargs: None

    def __enter__(self) -> Nothing:
        return self

    def __exit__(self, *error: object) -> None:
        return None


class OnCPU(TorchFunctionMode):
    """Takes "cuda" for the CPU wherever torch is given a device, and names CPU tensors as CUDA's."""

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if _on_cuda(kwargs.get("device")):
            kwargs["device"] = CPU
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
        stack.enter_context(patch.object(torch.nn.Module, "cuda", lambda module, *args: module))
        random = package("tensor_parallel.random")
        stack.enter_context(patch.object(random, "_get_cuda_rng_state", lambda *args, **kwargs: torch.get_rng_state()))
        stack.enter_context(
            patch.object(random, "_set_cuda_rng_state", lambda state, *args, **kwargs: torch.set_rng_state(state))
        )
        stack.enter_context(OnCPU())
        yield
