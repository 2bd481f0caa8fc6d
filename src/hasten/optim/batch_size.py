"""Search for a batch size that fits into memory, jointly on all ranks."""

from __future__ import annotations

import functools
import gc
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, overload

import torch

from hasten.errors import ConfigError, StepError
from hasten.runtime.context import ProcessContext
from hasten.runtime.devices import empty_cache
from hasten.runtime.logs import get_logger

P = ParamSpec("P")
R = TypeVar("R")
log = get_logger(__name__)

_OUT_OF_MEMORY = (  # messages of libraries that do not raise torch's error
    "out of memory",
    "CUDNN_STATUS_NOT_SUPPORTED",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
    "MODULE:PT_DEVMEM Allocation failed",
)


class Accumulates(Protocol):
    """The members of an Accelerator that the search uses."""

    gradient_accumulation_steps: int

    @property
    def ctx(self) -> ProcessContext: ...


@dataclass(frozen=True, slots=True)
class _Search:
    start: int
    reduce: Callable[..., int] | None
    accelerator: Accumulates | None
    keep_global_batch: bool

    def smaller(self, size: int) -> int:
        """Return the size to try after `size` did not fit."""
        if self.keep_global_batch and self.reduce is None:
            return next((n for n in range(size - 1, 0, -1) if self.start % n == 0), 0)
        return next_size(size, self.reduce)


def next_size(size: int, reduce: Callable[..., int] | None = None) -> int:
    """Return the size to try after `size` did not fit: nine tenths of it, or what `reduce` returns."""
    if reduce is None:
        return int(size * 0.9)
    return int(reduce(size) if _takes_a_size(reduce) else reduce())


def should_reduce_batch_size(exception: BaseException) -> bool:
    """Return True if `exception` reports that memory ran out."""
    if isinstance(exception, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(exception, RuntimeError) and any(
        text in str(exception) for text in _OUT_OF_MEMORY
    )


@overload
def find_executable_batch_size(
    function: Callable[Concatenate[int, P], R],
    starting_batch_size: int = ...,
    reduce_batch_size_fn: Callable[..., int] | None = ...,
    *,
    accelerator: Accumulates | None = ...,
    keep_global_batch: bool = ...,
) -> Callable[P, R]: ...
@overload
def find_executable_batch_size(
    function: None = ...,
    starting_batch_size: int = ...,
    reduce_batch_size_fn: Callable[..., int] | None = ...,
    *,
    accelerator: Accumulates | None = ...,
    keep_global_batch: bool = ...,
) -> Callable[[Callable[Concatenate[int, P], R]], Callable[P, R]]: ...
def find_executable_batch_size(
    function: Callable[..., Any] | None = None,
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[..., int] | None = None,
    *,
    accelerator: Accumulates | None = None,
    keep_global_batch: bool = False,
) -> Callable[..., Any]:
    """Return a decorator that calls the function with a batch size, and with smaller ones while memory runs out.

    The function takes the batch size as its first argument; callers omit it. With an `accelerator`, ranks try
    the same size together: when one runs out of memory, all try again (the function must fail before it waits for
    another rank in a collective). `keep_global_batch` multiplies the accelerator's accumulation steps so that
    batch size times steps stays constant; sizes are then divisors of the starting size. `reduce_batch_size_fn` is
    called with the size that did not fit, or without arguments if it needs none.

    Raises: StepError when no size is left to try.
    """
    if keep_global_batch and accelerator is None:
        raise ConfigError(
            "keep_global_batch=True needs the accelerator whose accumulation steps are to grow; without it the batch "
            "would silently shrink. Pass accelerator=accelerator."
        )
    search = _Search(
        starting_batch_size, reduce_batch_size_fn, accelerator, keep_global_batch
    )
    if function is None:
        return lambda wrapped: _search_decorator(wrapped, search)
    return _search_decorator(function, search)


def _search_decorator(
    user_function: Callable[..., Any], size_search: _Search
) -> Callable[..., Any]:
    @functools.wraps(user_function)
    def run(*args: Any, **kwargs: Any) -> Any:  # Any: arguments of the user's function
        _check_arguments(user_function, args)
        batch_size = size_search.start
        if size_search.accelerator is not None:
            accumulation_steps = size_search.accelerator.gradient_accumulation_steps
        else:
            accumulation_steps = 1
        while batch_size > 0:
            _free_memory()
            if size_search.keep_global_batch:
                _set_steps(size_search, batch_size, accumulation_steps)
            fits, output = _try_batch_size(
                user_function, batch_size, size_search, args, kwargs
            )
            if fits:
                return output
            smaller_size = _next_size(size_search, batch_size)
            log.warning(
                "batch size %d does not fit into memory; trying %d",
                batch_size,
                smaller_size,
            )
            batch_size = smaller_size
        raise StepError(
            f"{_function_name(user_function)} ran out of memory at every batch size from {size_search.start} down to zero; nothing is "
            "left to try. Use a smaller model, recompute activations, or shard it over more devices."
        )

    return run


def _try_batch_size(
    user_function: Callable[..., Any],
    size: int,
    size_search: _Search,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[bool, Any]:
    value = None
    error = None
    try:
        value = user_function(size, *args, **kwargs)
    # sent to the other ranks; all but a lack of memory are re-raised
    except Exception as raised:
        if not should_reduce_batch_size(raised):
            error = raised
        fits = False
    else:
        fits = True
    if size_search.accelerator is not None:
        comm = size_search.accelerator.ctx.world
    else:
        comm = None
    if comm is None or comm.size == 1:
        if error is not None:
            raise error
        return fits, value
    outcomes = comm.all_gather_object(
        "fits" if fits else ("failed" if error is not None else "memory")
    )
    if error is not None:
        raise error
    if "failed" in outcomes:
        failed_ranks = [
            comm.ranks[i] for i, verdict in enumerate(outcomes) if verdict == "failed"
        ]
        raise StepError(
            f"{_function_name(user_function)} raised on rank(s) {failed_ranks} at batch size {size}, for another reason than memory; this "
            "rank stops with them. See their error."
        )
    return all(verdict == "fits" for verdict in outcomes), value


def _next_size(size_search: _Search, size: int) -> int:
    smaller = size_search.smaller(size)
    if smaller >= size:
        raise ConfigError(
            f"reduce_batch_size_fn({size}) returned {smaller}, which is not smaller; the search would never end. "
            "Return a smaller batch size, or 0 to give up."
        )
    return smaller


def _takes_a_size(reduce: Callable[..., int]) -> bool:
    """Return True if the function needs an argument; functions that count themselves do not."""
    reducer_parameters = inspect.signature(reduce).parameters.values()
    return any(
        parameter.default is parameter.empty
        and parameter.kind is not parameter.VAR_KEYWORD
        for parameter in reducer_parameters
    )


def _set_steps(size_search: _Search, size: int, steps: int) -> None:
    if size_search.start % size:
        raise ConfigError(
            f"batch size {size} does not divide the starting batch size {size_search.start}; no number of accumulation "
            "steps keeps the global batch. Let reduce_batch_size_fn return divisors of it, or leave it out."
        )
    assert size_search.accelerator is not None, "keep_global_batch needs an accelerator"
    size_search.accelerator.gradient_accumulation_steps = steps * (
        size_search.start // size
    )


def _check_arguments(user_function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    names = [
        p.name
        for p in inspect.signature(user_function).parameters.values()
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    variadic = any(
        p.kind is p.VAR_POSITIONAL
        for p in inspect.signature(user_function).parameters.values()
    )
    if not variadic and len(names) < len(args) + 1:
        raise TypeError(
            f"{_function_name(user_function)} takes {names}, but was called with {len(args)} positional argument(s) besides the "
            f"batch size; the batch size is passed by find_executable_batch_size. Leave it out of the call."
        )


def _free_memory() -> None:
    gc.collect()
    if torch.accelerator.is_available():
        accelerator = torch.accelerator.current_accelerator()
        if accelerator is not None:
            empty_cache(accelerator)


def _function_name(user_function: Callable[..., Any]) -> str:
    return getattr(user_function, "__name__", "the function")
