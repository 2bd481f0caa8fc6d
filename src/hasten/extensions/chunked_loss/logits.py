"""Chunked loss of existing models: a head whose logits are computed when they are used, and for a loss in chunks.

`use_chunked_loss(model)` is all a script needs; the model's code and its loss stay as they are.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from hasten.errors import PrepareError, StepError
from hasten.extensions.chunked_loss.cross_entropy import (
    Head,
    LogitsChange,
    LossOptions,
    compute_dtype,
    compute_loss,
)
from hasten.modules import forwarding
from hasten.strategies.tensor.ops import gather_output

log = logging.getLogger(__name__)

# Any in this file: arguments of torch's functions, and models of other packages.
_CASTS: Final = frozenset(
    {Tensor.float, Tensor.half, Tensor.bfloat16, Tensor.to, Tensor.type}
)
_UNCHANGED_FUNCTIONS: Final = frozenset({Tensor.contiguous, Tensor.clone})
_SHAPES: Final = frozenset(
    {Tensor.view, Tensor.reshape, Tensor.flatten, torch.reshape, torch.flatten}
)
"""Functions that may merge the dimensions before the vocabulary."""
_PRODUCTS: Final = frozenset({torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__})
_QUOTIENTS: Final = frozenset(
    {torch.div, Tensor.div, Tensor.__truediv__, torch.true_divide, Tensor.true_divide}
)
_SUMS: Final = frozenset({torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__})
_TANH: Final = frozenset({torch.tanh, Tensor.tanh})
_OF_SHAPE: Final = frozenset(
    {
        *(
            getattr(Tensor, name).__get__
            for name in ("shape", "ndim", "dtype", "_base")
        ),
        *(
            getattr(Tensor, name)
            for name in ("size", "numel", "nelement", "dim", "__len__")
        ),
        *(
            getattr(where, name)
            for where in (torch, Tensor)
            for name in ("is_floating_point", "is_complex")
        ),
    }
)
"""Attributes and methods that need no values."""
_OF_HIDDEN: Final = frozenset(
    {
        *(
            getattr(Tensor, name).__get__
            for name in (
                "requires_grad",
                "grad_fn",
                "is_leaf",
                "device",
                "layout",
                "is_cuda",
            )
        ),
        *(getattr(Tensor, name) for name in ("register_hook", "get_device")),
    }
)
"""Attributes and methods with the same result for the hidden states and for the logits."""


def _return_logits(logits: Tensor) -> Tensor:
    return logits


class LogitsSource(NamedTuple):
    """Properties of a head that its logits need later."""

    chunk_tokens: int | None = None
    finish: Callable[[Tensor], Tensor] = _return_logits
    """Gathers a rank's part of the vocabulary."""
    gather: Callable[[], object] | None = None
    """Gathers the weight of a sharded head again for the loss."""


class LazyLogits(Tensor):
    """Logits that are computed when they are used; `cross_entropy` computes them for a chunk of tokens at a time.

    Without storage, it has the shape and dtype of the logits. Casts, scaling, soft caps, slices of tokens and merged dimensions
    leave it so; any other function gets the whole logits.
    """

    plain: Tensor
    """Meta tensor with the shape and dtype of the logits."""
    hidden: Tensor
    head: Head
    source: LogitsSource
    version: int
    computed: Tensor | None

    @staticmethod
    def of(
        hidden: Tensor,
        head: Head,
        source: LogitsSource,
        dtype: torch.dtype | None = None,
    ) -> LazyLogits:
        """Create the logits of a head."""
        shape = (*hidden.shape[:-1], head.vocabulary)
        with torch._C.DisableTorchFunctionSubclass():
            plain = torch.empty(shape, device="meta", dtype=dtype or head.compute)
            logits = plain.as_subclass(LazyLogits)
        logits.plain = plain
        logits.hidden = hidden
        logits.head = head
        logits.source = source
        logits.computed = None
        logits.version = _weight_version(head.weight)
        return logits

    def compute(self) -> Tensor:
        """Return the logits, differentiable.

        Raises: StepError if the weights have changed since the forward pass.
        """
        if getattr(self, "head", None) is None:
            raise StepError(
                "the logits of a compiled model with a chunked loss are not part of its graph's results, so they cannot be "
                "read outside. Compute what you need of them inside the model, call the model without labels under "
                "torch.no_grad(), or do not compile the whole model."
            )
        if self.computed is not None:
            return self.computed
        hidden = self.hidden
        head = self.head
        self._check_weights()
        with torch.autocast(hidden.device.type, enabled=False):
            bias = None if head.bias is None else head.bias.to(head.compute)
            logits = F.linear(
                hidden.to(head.compute), head.weight.to(head.compute), bias
            )
            return head.change.change_logits(self.source.finish(logits)).to(
                self.plain.dtype
            )

    def _check_weights(self) -> None:
        """Raise if the weights are others than in the forward pass."""
        is_freed = (
            not torch.compiler.is_compiling()
            and self.head.weight.untyped_storage().size() == 0
        )
        if is_freed or self._is_outdated():
            raise StepError(
                "these logits of a model with a chunked loss are computed when they are used, and the head's weights have been "
                f"{'freed' if is_freed else 'changed'} since the forward pass, so that they would be others. Use them before "
                "optimizer.step(), or keep what you need of them: `outputs.logits.detach()`."
            )

    def _is_outdated(self) -> bool:
        return _weight_version(self.head.weight) != self.version

    def _with_changes(
        self,
        hidden: Tensor | None = None,
        head: Head | None = None,
        dtype: torch.dtype | None = None,
    ) -> LazyLogits:
        logits = LazyLogits.of(
            self.hidden if hidden is None else hidden,
            self.head if head is None else head,
            self.source,
            self.plain.dtype if dtype is None else dtype,
        )
        logits.version = self.version
        return logits

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        logits = args[0] if args else kwargs.get("input")
        if (
            isinstance(logits, LazyLogits)
            and getattr(logits, "head", None) is not None
            and logits.computed is None
        ):
            answer = logits._compute_without_logits(func, args, kwargs)
            if answer is not NotImplemented:
                return answer
            if _is_in_place(func):
                logits.computed = logits.compute()
        with torch._C.DisableTorchFunctionSubclass():
            return func(*_compute_logits(args), **_compute_logits(kwargs))

    def _compute_without_logits(
        self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Return the function's result as far as it needs no logits; NotImplemented otherwise."""
        if func is F.cross_entropy:
            return self._cross_entropy(
                *args[1:],
                **{key: value for key, value in kwargs.items() if key != "input"},
            )
        if func in _OF_SHAPE:
            return func(self.plain, *args[1:], **kwargs)
        if func in _OF_HIDDEN:
            return func(self.hidden, *args[1:], **kwargs)
        if func in _UNCHANGED_FUNCTIONS:
            return self
        if func in _CASTS:
            return self._cast_logits(func, args[1:], kwargs)
        if func in _SHAPES:
            shape = func(self.plain, *args[1:], **kwargs).shape
            if shape and shape[-1] == self.head.vocabulary:
                return self._with_changes(
                    self.hidden.reshape(*shape[:-1], self.hidden.shape[-1])
                )
            return NotImplemented
        if func is Tensor.__getitem__ and _leaves_last(args[1], self.plain.ndim):
            return self._with_changes(self.hidden[args[1]])
        return self._change_logits(func, args, kwargs)

    def _cast_logits(
        self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        dtypes_by_function = {
            Tensor.float: torch.float32,
            Tensor.half: torch.float16,
            Tensor.bfloat16: torch.bfloat16,
        }
        if func in dtypes_by_function:
            return self._with_changes(dtype=dtypes_by_function[func])
        cast_arguments = [*args, *kwargs.values()]
        is_supported = all(
            isinstance(argument, torch.dtype) or argument == self.hidden.device
            for argument in cast_arguments
        )
        dtype = next(
            (
                argument
                for argument in cast_arguments
                if isinstance(argument, torch.dtype)
            ),
            None,
        )
        if not is_supported or dtype == torch.float64:
            return NotImplemented
        return self._with_changes(dtype=dtype)

    def _change_logits(
        self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Return scaled or soft-capped logits, or logits with a bias added; NotImplemented for another function."""
        change = self.head.change
        if func in _TANH and len(args) == 1:
            capped_change = change.add_tanh()
            if capped_change is None:
                return NotImplemented
            return self._with_changes(head=self.head._replace(change=capped_change))
        if len(args) != 2 or kwargs:
            return NotImplemented
        operand = args[1]
        if (
            isinstance(operand, (int, float))
            and not isinstance(operand, bool)
            and func in _PRODUCTS | _QUOTIENTS
        ):
            if func in _PRODUCTS:
                factor = float(operand)
            else:
                factor = 1 / float(operand)
            return self._with_changes(
                head=self.head._replace(change=change.add_scale(factor))
            )
        if func in _SUMS and self._is_bias(operand):
            flat_bias = operand.flatten()
            if self.head.bias is None:
                bias = flat_bias
            else:
                bias = self.head.bias + flat_bias
            dtype = torch.promote_types(self.plain.dtype, operand.dtype)
            return self._with_changes(head=self.head._replace(bias=bias), dtype=dtype)
        return NotImplemented

    def _is_bias(self, operand: Any) -> bool:
        has_bias_shape = (
            isinstance(operand, Tensor)
            and operand.numel() == operand.shape[-1:].numel() == self.head.vocabulary
        )
        return (
            has_bias_shape
            and self.head.group is None
            and self.head.change == LogitsChange()
        )

    def _cross_entropy(
        self,
        target: Tensor,
        weight: Tensor | None = None,
        size_average: bool | None = None,
        ignore_index: int = -100,
        reduce: bool | None = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> Any:
        by_class = (
            weight is not None
            or size_average is not None
            or reduce is not None
            or target.is_floating_point()
        )
        if by_class or self.hidden.ndim != 2 or target.ndim != 1:
            return NotImplemented
        if self._is_outdated():
            self._check_weights()
        options = LossOptions(
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
            reduction=reduction,  # type: ignore[arg-type]  # any text; checked there
            chunk_tokens=self.source.chunk_tokens,
        )
        if (
            self.source.gather is not None
            and not self.head.weight.untyped_storage().size()
        ):
            self.source.gather()
        return compute_loss(self.hidden, self.head, target, options)


def _leaves_last(index: Any, ndim: int) -> bool:
    """Return whether an index of a tensor takes all of its last dimension."""
    index_parts = index if isinstance(index, tuple) else (index,)
    if any(index_part is None for index_part in index_parts):
        return False
    num_indexed_dims = 0
    for index_part in index_parts:
        is_mask = isinstance(index_part, Tensor) and index_part.dtype == torch.bool
        num_indexed_dims += index_part.ndim if is_mask else 1
    if any(index_part is Ellipsis for index_part in index_parts):
        last_index = index_parts[-1]
        return isinstance(last_index, slice) and last_index == slice(None)
    return num_indexed_dims < ndim or (
        isinstance(index_parts[-1], slice) and index_parts[-1] == slice(None)
    )


def _weight_version(x: Tensor) -> int:
    """Return the number of in-place changes; while a graph is traced, none happens between forward pass and loss."""
    if torch.compiler.is_compiling() or x.is_inference():
        return 0
    return x._version


def _is_in_place(func: Callable[..., Any]) -> bool:
    """Return whether a function changes its first argument."""
    name = getattr(func, "__name__", "")
    is_augmented = name.startswith("__i") and name not in (
        "__int__",
        "__index__",
        "__invert__",
        "__iter__",
    )
    return (
        name == "__setitem__"
        or is_augmented
        or (name.endswith("_") and not name.endswith("__"))
    )


def _compute_logits(values: Any) -> Any:
    """Return the arguments with computed logits."""
    if isinstance(values, LazyLogits):
        return values.compute()
    if isinstance(values, (list, tuple)):
        return type(values)(list(map(_compute_logits, values)))
    if isinstance(values, dict):
        return {key: _compute_logits(value) for key, value in values.items()}
    return values


class ChunkedHead(forwarding.LateHead):
    """Forward of a linear head that returns logits to be computed later."""

    def __init__(self, chunk_tokens: int | None) -> None:
        self.chunk_tokens = chunk_tokens

    def __call__(self, x: Tensor) -> Tensor:
        # a split head's own forward makes its logits; without gradients the ranks of a sharded head need not meet again
        if forwarding.find(self.module, "tensor") or (
            self.gathered_by is not None and not torch.is_grad_enabled()
        ):
            logits: Tensor = self.inner(x)
            return logits
        assert isinstance(self.module, nn.Linear), "use_chunked_loss checked it"
        weight = self.module.weight
        bias = self.module.bias
        head = Head(weight, bias, None, weight.shape[0], compute_dtype(x))
        return LazyLogits.of(
            x, head, LogitsSource(self.chunk_tokens, gather=self.gather())
        )

    def split_logits(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, group: dist.ProcessGroup
    ) -> Tensor:
        head = Head(
            weight, bias, group, weight.shape[0] * group.size(), compute_dtype(x)
        )
        return LazyLogits.of(
            x,
            head,
            LogitsSource(
                self.chunk_tokens,
                partial(gather_output, dim=-1, group=group),
                self.gather(),
            ),
        )

    def gather(self) -> Callable[[], object] | None:
        """Return a function that gathers a sharded weight again; None for a weight that is whole. Ranks: every rank."""
        owner = None if self.gathered_by is None else self.gathered_by()
        return None if owner is None else owner.unshard


def use_chunked_loss(
    model: nn.Module,
    head: nn.Module | str | None = None,
    chunk_tokens: int | None = None,
) -> None:
    """Compute the model's cross entropy in chunks of tokens, so that the logits of a batch never exist at once.

    The model and its loss stay as they are: its head returns logits that `torch.nn.functional.cross_entropy` computes for
    `chunk_tokens` tokens at a time, and that any other function gets whole. Call it before `prepare()`. `head` is the
    output layer or its name; by default that of transformers' `get_output_embeddings()`.

    Raises: PrepareError for a model without a known head, or a head that is not a plain linear layer.
    """
    head_layer, head_name = _find_head(model, head)
    if (
        not isinstance(head_layer, nn.Linear)
        or type(head_layer).forward is not nn.Linear.forward
    ):
        raise PrepareError(
            f"the head {head_name!r} of {type(model).__name__} is a {type(head_layer).__name__}, which computes more than a plain linear "
            "layer, so that a loss from its weight alone would be another. Leave this head as it is (adapters, quantised layers), "
            "or pass head= with the torch.nn.Linear that returns the logits."
        )
    forwarding.restore(head_layer, ChunkedHead.tag)
    forwarding.replace(head_layer, ChunkedHead(chunk_tokens))
    log.info(
        "chunked loss: logits of %s (%d classes) are computed for the loss in chunks",
        head_name,
        head_layer.out_features,
    )


def _find_head(model: nn.Module, head: nn.Module | str | None) -> tuple[nn.Module, str]:
    if isinstance(head, str):
        return model.get_submodule(head), head
    if head is None:
        # of a wrapper such as DistributedDataParallel
        unwrapped_model: Any = getattr(model, "module", model)
        if hasattr(unwrapped_model, "get_output_embeddings"):
            output_layer: nn.Module | None = unwrapped_model.get_output_embeddings()
            head = output_layer
    if head is None:
        linear_names = []
        for layer_name, module in model.named_modules():
            if isinstance(module, nn.Linear):
                linear_names.append(layer_name)
        raise PrepareError(
            f"{type(model).__name__} does not say which layer computes its logits (it has no method get_output_embeddings), so nothing can be "
            f"computed in chunks. Name the layer with head=; its last linear layer is {(linear_names or ['none'])[-1]!r}."
        )
    return head, next(
        (layer_name for layer_name, module in model.named_modules() if module is head),
        type(head).__name__,
    )
