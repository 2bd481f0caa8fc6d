"""Emulation of GPU memory use on CPU tensors: fused attention, boolean dropout masks, autocast's float32 list.

Torch has no fake CUDA device without CUDA, so plans are made on fake CPU tensors, and the few functions whose memory use
differs are replaced while the step is traced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.overrides import TorchFunctionMode

_HALF_DTYPES: Final = (torch.float16, torch.bfloat16)
_IN_FLOAT32: Final = frozenset(
    (
        *(
            functional.layer_norm,
            functional.group_norm,
            functional.softmax,
            functional.log_softmax,
        ),
        *(
            functional.cross_entropy,
            functional.nll_loss,
            functional.mse_loss,
            functional.l1_loss,
        ),
        *(
            functional.binary_cross_entropy_with_logits,
            functional.kl_div,
            functional.smooth_l1_loss,
        ),
        *(
            functional.softplus,
            functional.normalize,
            torch.softmax,
            torch.log_softmax,
            torch.exp,
            torch.log,
        ),
        *(torch.pow, torch.rsqrt, torch.cumsum, torch.prod, torch.norm, torch.sum),
        *(
            Tensor.softmax,
            Tensor.log_softmax,
            Tensor.exp,
            Tensor.log,
            Tensor.pow,
            Tensor.sum,
            Tensor.cumsum,
        ),
    )
)
"""Functions that autocast computes in float32 on GPUs but not on CPUs."""

Attention = Callable[[float, str], None]
"""Callback for each attention: forward operations (the backward has 2.5 times as many) and dtype."""


class FusedAttention(torch.autograd.Function):
    """Attention that saves what a fused kernel saves: query, key, value, output and one number per row."""

    @staticmethod
    # Any: as in torch
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        attended = query.new_empty(*query.shape[:-1], value.shape[-1])
        row_sums = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, attended, row_sums)
        return attended

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:  # Any: likewise
        query, key, value, *_ = ctx.saved_tensors
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


@contextmanager
def use_gpu_rules(record_attention: Attention) -> Iterator[None]:
    """Replace functions whose memory use on a GPU differs from that on a CPU, inside the block."""

    # Any: ignored
    def run_attention(
        query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
    ) -> Tensor:
        return _run_attention(
            record_attention, query, key, value, is_causal=bool(kwargs.get("is_causal"))
        )

    torch_functions = functional.scaled_dot_product_attention, functional.dropout
    functional.scaled_dot_product_attention = run_attention
    functional.dropout = _apply_dropout
    float32_rules = _Float32List()
    hooks = (
        register_module_forward_pre_hook(float32_rules.entered),
        register_module_forward_hook(float32_rules.left, always_call=True),
    )
    try:
        with float32_rules:
            yield
    finally:
        functional.scaled_dot_product_attention, functional.dropout = torch_functions
        for hook in hooks:
            hook.remove()


class _Float32List(TorchFunctionMode):
    """Function mode that casts inputs of operations that GPUs compute in float32 under autocast.

    Torch disables function modes during a backward; blocks that are recomputed there enable it again.
    """

    def __init__(self) -> None:
        super().__init__()
        self._in_backward = False
        self._depth = 0

    def entered(self, module: nn.Module, inputs: object) -> None:
        """Enable the mode while a module is recomputed."""
        if self._in_backward:
            self._depth += 1
            if self._depth == 1:
                self.__enter__()  # type: ignore[no-untyped-call]  # torch leaves it untyped

    def left(self, module: nn.Module, inputs: object, output: object) -> None:
        """Disable the mode again."""
        if self._in_backward:
            self._depth -= 1
            if self._depth == 0:
                self.__exit__(None, None, None)  # type: ignore[no-untyped-call]  # likewise

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:  # Any: torch's protocol
        kwargs = kwargs or {}
        if func is Tensor.backward:
            self._in_backward = True
            try:
                return func(*args, **kwargs)  # type: ignore[no-untyped-call]  # torch leaves it untyped
            finally:
                self._in_backward = False
        if func in _IN_FLOAT32 and torch.is_autocast_enabled("cpu"):
            args = tuple(map(_to_float32, args))
            kwargs = {name: _to_float32(argument) for name, argument in kwargs.items()}
        return func(*args, **kwargs)


def _run_attention(
    record_attention: Attention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    is_causal: bool,
) -> Tensor:
    """Return the output of an attention; mask, dropout and grouping do not affect the saved tensors."""
    if torch.is_autocast_enabled("cpu"):
        half_dtype = torch.get_autocast_dtype("cpu")
        query = query.to(half_dtype)
        key = key.to(half_dtype)
        value = value.to(half_dtype)
    num_pairs = query.numel() // query.shape[-1] * key.shape[-2]
    forward_flops = (
        2.0 * num_pairs * (query.shape[-1] + value.shape[-1]) / (2 if is_causal else 1)
    )
    record_attention(forward_flops, str(query.dtype).removeprefix("torch."))
    attended: Tensor = FusedAttention.apply(query, key, value)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return attended


def _to_float32(argument: Any) -> Any:  # Any: an argument of a torch function
    if isinstance(argument, Tensor) and argument.dtype in _HALF_DTYPES:
        return argument.float()
    return argument


def _apply_dropout(
    input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor:
    """Apply dropout with a mask of one byte per element."""
    if not training or p == 0.0:
        return input
    dropped, _ = torch.native_dropout(input, p, True)
    return dropped
