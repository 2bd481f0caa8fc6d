"""Memory: what to do when it runs out, and giving it back."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from inspect import signature
from typing import Any

import torch

from accelerate._impl.environment.packages import (
    is_cuda_available,
    is_mps_available,
    is_npu_available,
    is_xpu_available,
)
from accelerate._impl.surface.messages import message
from hasten.optim.batch_size import next_size, should_reduce_batch_size


def clear_device_cache(garbage_collection: bool = False) -> None:
    if garbage_collection:
        gc.collect()
    availability = (
        is_cuda_available(),
        is_mps_available(),
        is_npu_available(),
        is_xpu_available(),
    )
    device_modules = []
    for kind, is_available in zip(
        ("cuda", "mps", "npu", "xpu"), availability, strict=True
    ):
        if is_available:
            device_modules.append(getattr(torch, kind))
    for module in (
        device_modules or [torch.accelerator] * torch.accelerator.is_available()
    ):
        module.empty_cache()


def release_memory(*objects: Any) -> list[None]:  # Any: the caller's objects
    """None for every object, and memory that is free again once the caller has dropped them."""
    count = len(objects)
    del objects
    clear_device_cache(garbage_collection=True)
    return [None] * count


def find_executable_batch_size(
    function: Callable[..., Any] | None = None,
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[..., int] | None = None,
) -> Callable[..., Any]:  # Any: the decorated function, or a decorator
    """Return a decorator that calls the function with a batch size, and with smaller ones while memory runs out."""
    decorate = partial(_search_batch_size, starting_batch_size, reduce_batch_size_fn)
    return decorate if function is None else decorate(function)


def _search_batch_size(
    size: int, reduce_fn: Callable[..., int] | None, function: Callable[..., Any]
) -> Callable[..., Any]:
    names = list(signature(function).parameters)

    def decorator(*args: Any, **kwargs: Any) -> Any:
        nonlocal size  # the next call goes on from here
        clear_device_cache(garbage_collection=True)
        if len(names) < len(args) + 1:
            argument_text = ", ".join(
                f"{argument_name}={argument_value}"
                for argument_name, argument_value in zip(
                    names[1:], args[1:], strict=False
                )
            )
            raise TypeError(
                message("batch_size_given", function.__name__, argument_text)
            )
        while size > 0:
            try:
                return function(size, *args, **kwargs)
            except Exception as error:  # all but a lack of memory are re-raised
                if not should_reduce_batch_size(error):
                    raise
            clear_device_cache(garbage_collection=True)
            size = next_size(size, reduce_fn)
        raise RuntimeError("No executable batch size found, reached zero.")

    return decorator
