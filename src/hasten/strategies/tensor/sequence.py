"""Sequence parallelism: between split layers, each tensor-parallel rank holds and computes a shard of the tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hasten import trees
from hasten.config.sections.parallel import TensorStyle
from hasten.errors import ConfigError, StepError
from hasten.modules import forwarding
from hasten.strategies.blocks import repeated_blocks
from hasten.strategies.context.ops import all_parts, collect, summed_part
from hasten.strategies.fsdp.shard_groups import CONTAINERS
from hasten.strategies.tensor.ops import RankRandomStream, enter, gather, split

_BY_COLUMNS: Final = ("colwise", "colwise_halves", "colwise_thirds")
"""Styles of layers that take all tokens and return a shard of the features."""

# Any in this file: arguments and outputs of the user's modules, and torch's untyped autograd.Function.


class _Scatter(torch.autograd.Function):
    """Reduce-scatter: this rank's shard of the sum over ranks; the gradient is all-gathered."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return summed_part(list(x.chunk(group.size(), dim)), group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return torch.cat(all_parts(grad, ctx.group), ctx.dim), None, None


class SequenceRegion:
    """Stack of blocks in which inputs of split layers are gathered along the sequence, and their outputs are scattered."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self._whole_inputs: list[Tensor] = []
        self._last_gathered: tuple[Tensor, Tensor] | None = None

    def open(self, whole: list[Tensor]) -> None:
        """Start a block; `whole` holds its inputs besides the hidden states, with all tokens on every rank."""
        self._whole_inputs = whole

    def close(self) -> None:
        """End a block."""
        self._whole_inputs, self._last_gathered = [], None

    def gathered(self, x: Tensor) -> Tensor:
        """Return all tokens of a split layer's input; layers with the same input share one gather. Ranks: the group."""
        if self._last_gathered is not None and (
            x is self._last_gathered[0] or x is self._last_gathered[1]
        ):
            return self._last_gathered[1]
        if any(x is known for known in self._whole_inputs):
            return enter(x, self.group)
        self._last_gathered = (x, collect(x, x.ndim - 2, self.group))
        return self._last_gathered[1]

    def scattered(self, x: Tensor) -> Tensor:
        """Return this rank's tokens of the sum of the ranks' partial results. Ranks: the group."""
        own_sum: Tensor = _Scatter.apply(x, x.ndim - 2, self.group)  # type: ignore[no-untyped-call]  # as torch is
        return own_sum


class SequenceInput(forwarding.Forward):
    """Forward of a module with layers split by columns: it gets all tokens, and derives its sizes from them."""

    tag = "sequence input"

    def __init__(self, region: SequenceRegion) -> None:
        self.region = region

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        tensors = [
            value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)
        ]
        hidden = next((value for value in tensors if value.is_floating_point()), None)
        if hidden is None:
            return self.inner(*args, **kwargs)

        def gather_hidden(value: Any) -> Any:
            is_alike = (
                isinstance(value, Tensor)
                and value.ndim == hidden.ndim
                and value.shape[-1] == hidden.shape[-1]
            )
            return (
                self.region.gathered(value)
                if is_alike and value.is_floating_point()
                else value
            )

        return self.inner(
            *(gather_hidden(value) for value in args),
            **{key: gather_hidden(value) for key, value in kwargs.items()},
        )


class SequenceBlock(forwarding.Forward):
    """Forward of a block on this rank's tokens; the first block of a stack splits the tokens, the last one gathers them."""

    tag = "sequence"

    def __init__(
        self, region: SequenceRegion, apart: RankRandomStream, first: bool, last: bool
    ) -> None:
        self.region = region
        self.apart = apart
        self.first = first
        self.last = last

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        name = (
            None
            if args
            else next(
                (key for key, value in kwargs.items() if isinstance(value, Tensor)),
                None,
            )
        )
        hidden = args[0] if args else kwargs.get(name or "")
        if not isinstance(hidden, Tensor) or hidden.ndim < 2:
            raise StepError(
                f"{type(self.module).__name__} was called without hidden states as its first argument, so there are no tokens to split; "
                "set sequence_parallel=False for this model."
            )
        other_inputs = (
            args[1:],
            {key: value for key, value in kwargs.items() if key != name},
        )
        if self.first:
            hidden = self._divided(hidden)
        self.region.open(trees.tensors(other_inputs))
        self.apart.begin(self.module)
        try:
            outputs = (
                self.inner(hidden, *args[1:], **kwargs)
                if args
                else self.inner(**{**kwargs, str(name): hidden})
            )
        finally:
            self.apart.end()
            self.region.close()
        return self._joined(outputs) if self.last else outputs

    def _divided(self, hidden: Tensor) -> Tensor:
        length, ranks = hidden.shape[-2], self.region.group.size()
        if length % ranks:
            raise ConfigError(
                f"tp_size={ranks} does not divide the {length} tokens of a sequence, but sequence_parallel needs equal numbers on all "
                f"ranks. Pad sequences to {-(-length // ranks) * ranks}, a multiple of {ranks}, or set "
                "sequence_parallel=False."
            )
        return split(hidden, hidden.ndim - 2, self.region.group)

    def _joined(self, out: Any) -> Any:
        if isinstance(out, Tensor):
            return gather(out, out.ndim - 2, self.region.group)
        if isinstance(out, (tuple, list)) and out and isinstance(out[0], Tensor):
            return type(out)(
                [gather(out[0], out[0].ndim - 2, self.region.group), *out[1:]]
            )
        raise StepError(
            f"{type(self.module).__name__} returned a {type(out).__name__}, which contains no hidden states to gather; set "
            "sequence_parallel=False for this model."
        )


class PerToken(forwarding.Forward):
    """Forward of a whole layer that sees a shard of the tokens or heads: its gradients are summed over ranks."""

    tag = "per-token"

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module_dict = self.module.__dict__
        names = [
            name
            for name, value in self.module.named_parameters(recurse=False)
            if value.requires_grad
        ]
        try:
            # an entry of the module's __dict__ takes precedence over the parameter
            for name in names:
                module_dict[name] = enter(self.module.get_parameter(name), self.group)
            return self.inner(*args, **kwargs)
        finally:
            for name in names:
                module_dict.pop(name, None)


def check(
    model: nn.Module, styles: Mapping[str, TensorStyle]
) -> list[list[tuple[str, nn.Module]]]:
    """Return the stacks of blocks in which tokens can be sharded between split layers.

    Raises: ConfigError for a layer in a block that would need all tokens.
    """
    stacks: dict[str, list[tuple[str, nn.Module]]] = {}
    for name, block in repeated_blocks(model):
        stacks.setdefault(name.rpartition(".")[0], []).append((name, block))
    split_stacks = [
        stack
        for stack in stacks.values()
        if any(s.startswith(f"{name}.") for name, _ in stack for s in styles)
    ]
    if not split_stacks:
        raise ConfigError(
            f"sequence_parallel=True was requested, but {type(model).__name__} has no list of repeated blocks with "
            "split layers, so there are no tokens to split. Set it to False."
        )
    for name, block in (pair for stack in split_stacks for pair in stack):
        for relative_name, layer in block.named_modules():
            full_name = f"{name}.{relative_name}" if relative_name else name
            style = styles.get(full_name)
            if style in (*_BY_COLUMNS, "rowwise") or not dict(
                layer.named_parameters(recurse=False)
            ):
                continue
            if style is None and "Norm" in type(layer).__name__:
                continue
            reason = "is whole" if style is None else f"is split {style}"
            raise ConfigError(
                f"sequence_parallel=True gives every rank a part of the tokens, but {full_name!r} "
                f"({type(layer).__name__}) in a block {reason}; only norms can process parts of a sequence; other layers must be split. "
                "Split the layer with tp_plan, or set sequence_parallel=False."
            )
    return split_stacks


def install(
    stacks: list[list[tuple[str, nn.Module]]],
    styles: Mapping[str, TensorStyle],
    group: dist.ProcessGroup,
    apart: RankRandomStream,
) -> dict[str, tuple[SequenceRegion, bool]]:
    """Replace the forwards of blocks, of modules that contain split layers, and of whole layers.

    Returns, for each split layer, its region and whether its input is gathered before: a block that contains split layers
    directly works on its shard of the tokens beside them, so each of these layers gathers its input.
    """
    regions: dict[str, tuple[SequenceRegion, bool]] = {}
    for stack in stacks:
        region = SequenceRegion(group)
        for index, (name, block) in enumerate(stack):
            layers_by_name = {
                f"{name}.{relative_name}" if relative_name else name: layer
                for relative_name, layer in block.named_modules()
            }
            holders = {
                full_name: _calling_module(full_name, layers_by_name)
                for full_name in layers_by_name
                if styles.get(full_name) in _BY_COLUMNS
            }
            for full_name, layer in layers_by_name.items():
                if full_name in styles:
                    regions[full_name] = region, holders.get(full_name, name) != name
                elif dict(layer.named_parameters(recurse=False)):
                    forwarding.replace(layer, PerToken(group))
                elif full_name != name and full_name in holders.values():
                    forwarding.replace(layer, SequenceInput(region))
            forwarding.replace(
                block, SequenceBlock(region, apart, index == 0, index == len(stack) - 1)
            )
    return regions


def _calling_module(layer_name: str, layers_by_name: Mapping[str, nn.Module]) -> str:
    """Return the module that calls a layer: the innermost module around it that is not a container."""
    parent_name = layer_name.rpartition(".")[0]
    while isinstance(layers_by_name[parent_name], CONTAINERS):
        parent_name = parent_name.rpartition(".")[0]
    return parent_name
