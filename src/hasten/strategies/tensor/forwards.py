"""Forwards of layers that are split over tensor-parallel ranks."""

from __future__ import annotations

from typing import Any, Literal, assert_never

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from hasten.config.sections.parallel import TensorStyle
from hasten.errors import StepError
from hasten.modules import forwarding
from hasten.strategies.experts.strategy import CalledExperts
from hasten.strategies.tensor.layers import BLOCKS, matrix_of
from hasten.strategies.tensor.ops import (
    BlockShares,
    RankRandomStream,
    enter,
    gather,
    leave,
    split,
)
from hasten.strategies.tensor.sequence import SequenceRegion


class SplitForward(forwarding.Forward):
    """Forward of a layer of which this rank holds a shard."""

    tag = "tensor"
    transposed = False
    """The layer stores its weight as [inputs, outputs]."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        apart: RankRandomStream,
        region: SequenceRegion | None = None,
    ) -> None:
        self.group = group
        self.apart = apart
        self.region = region
        """Region of sequence parallelism around this layer; None if every rank has all tokens."""

    def part(self, name: str) -> Tensor | None:
        """Return this rank's shard of a parameter, differentiable; None if the layer lacks the parameter."""
        parameter: Tensor | None = getattr(self.module, name)
        return parameter.to_local() if isinstance(parameter, DTensor) else parameter

    def matrix(self) -> Tensor:
        """Return this rank's shard of the weight as [outputs, inputs], differentiable."""
        weight = self.part("weight")
        assert weight is not None, "a linear layer has a weight"
        return weight.t() if self.transposed else weight

    def applied(self, x: Tensor, **replacements: Tensor | int | None) -> Tensor:
        """Call the module's overridden forward on `x`, with shards in place of its parameters."""
        module_dict = self.module.__dict__
        try:
            # an entry of the module's __dict__ takes precedence over the parameter
            module_dict.update(replacements)
            output: Tensor = self.inner(x)
            return output
        finally:
            for name in replacements:
                if name in self.module._parameters:
                    module_dict.pop(name, None)

    def multiplied(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Multiply by rows or columns of the weight, with the forward of the layer's class."""
        if (
            isinstance(self.module, nn.Linear)
            and type(self.module).forward is not nn.Linear.forward
        ):
            return self.applied(x, weight=weight, bias=bias)
        return F.linear(x, weight, bias)


class Colwise(SplitForward):
    """Forward that computes this rank's output features from the whole input."""

    output: Literal["part", "whole"] = "part"
    gathered = False
    """The surrounding module has already gathered the tokens."""

    def weights(self) -> tuple[Tensor, Tensor | None]:
        """Return the rows of weight and bias for this rank's output features."""
        return self.matrix(), self.part("bias")

    def __call__(self, x: Tensor) -> Tensor:
        weight, bias = self.weights()
        if self.region is None:
            x = enter(x, self.group)
        elif not self.gathered:
            x = self.region.gathered(x)
        late_head = (
            None
            if self.output == "part"
            else forwarding.find(self.module, forwarding.LateHead.tag)
        )
        if isinstance(late_head, forwarding.LateHead):
            return late_head.split_logits(x, weight, bias, self.group)
        out = self.multiplied(x, weight, bias)
        if self.output == "whole":
            return gather(out, -1, self.group)
        self.apart.begin(self.module)
        return out


class ColwiseBlocks(Colwise):
    """Forward of a layer that joins several projections, such as queries, keys and values, of which it computes a share each.

    A rank stores consecutive rows of the weight, as checkpoints do, and exchanges them for the rows of its heads.
    """

    blocks = 1
    _shares: BlockShares | None = None

    def weights(self) -> tuple[Tensor, Tensor | None]:
        stored_rows, bias = self.matrix(), self.part("bias")
        if self._shares is None:
            self._shares = BlockShares(
                stored_rows.shape[0], self.blocks, self.group, stored_rows.device
            )
        return self._shares.exchanged(
            stored_rows
        ), None if bias is None else self._shares.exchanged(bias)


class Rowwise(SplitForward):
    """Forward that computes the contribution of this rank's input features; the results are summed over ranks."""

    whole_input = False

    def __call__(self, x: Tensor) -> Tensor:
        weight, bias = self.matrix(), self.part("bias")
        width = x.shape[-1] // self.group.size() if self.whole_input else x.shape[-1]
        if width != weight.shape[-1]:
            self._refuse_features(x.shape[-1], weight.shape[-1])
        if self.region is not None:
            summed_output = self.region.scattered(self.multiplied(x, weight, None))
            return (
                summed_output
                if bias is None
                else summed_output + enter(bias, self.group).to(summed_output.dtype)
            )
        self.apart.end()
        input_part = split(x, -1, self.group) if self.whole_input else x
        summed_output = leave(self.multiplied(input_part, weight, None), self.group)
        return (
            summed_output
            if bias is None
            else summed_output + bias.to(summed_output.dtype)
        )

    def _refuse_features(self, num_features: int, expected_features: int) -> None:
        if self.region is not None:
            raise StepError(
                f"a layer split rowwise got {num_features} features instead of {expected_features}: with "
                "sequence_parallel the hidden states of a block contain part of the tokens, but the projections return all of them. "
                "Take the number of tokens from a projection's output, as in "
                "`projected.unflatten(-1, (-1, head_dim))`, or set sequence_parallel=False."
            )
        raise StepError(
            f"a {type(self.module).__name__} split rowwise over {self.group.size()} ranks got {num_features} features instead of the "
            f"{expected_features} of one rank, so its input is not the output of a layer split colwise. Name the layers in tp_plan: "
            "'rowwise_split_input' for a layer with a whole input, 'replicate' for one that must not be split."
        )


class _SplitEmbedding(SplitForward):
    """Forward of an embedding of which this rank holds some rows or columns."""

    def looked_up(self, tokens: Tensor, weight: Tensor, padding: int | None) -> Tensor:
        """Look up tokens in a shard of the table, with the forward of the embedding's class."""
        if type(self.module).forward is nn.Embedding.forward:
            return F.embedding(tokens, weight, padding)
        whole_padding = self.module.padding_idx
        try:
            return self.applied(tokens, weight=weight, padding_idx=padding)
        finally:
            self.module.__dict__["padding_idx"] = whole_padding


class VocabularyRows(_SplitEmbedding):
    """Embedding lookup of tokens whose rows this rank holds; the results are summed over ranks."""

    def __call__(self, tokens: Tensor) -> Tensor:
        weight = self.part("weight")
        assert weight is not None, "an embedding has a table"
        assert isinstance(self.module, nn.Embedding), "the plan was checked"
        first_row = self.group.rank() * weight.shape[0]
        local_tokens = tokens - first_row
        is_elsewhere = (local_tokens < 0) | (local_tokens >= weight.shape[0])
        padding = self.module.padding_idx
        own_padding = (
            None
            if padding is None or not 0 <= padding - first_row < weight.shape[0]
            else padding - first_row
        )
        rows = self.looked_up(
            local_tokens.masked_fill(is_elsewhere, 0), weight, own_padding
        )
        return leave(rows.masked_fill(is_elsewhere.unsqueeze(-1), 0), self.group)


class TableColumns(_SplitEmbedding):
    """Embedding lookup in this rank's columns of a table."""

    def __call__(self, tokens: Tensor) -> Tensor:
        weight = self.part("weight")
        assert weight is not None, "an embedding has a table"
        assert isinstance(self.module, nn.Embedding), "the plan was checked"
        return self.looked_up(tokens, weight, self.module.padding_idx)


class SplitExperts(CalledExperts):
    """Forward that computes this rank's experts for the tokens that chose them; the results are summed over ranks."""

    tag = "tensor"

    # Any: three tensors, by position or name
    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        hidden, chosen_experts, weights = self.arguments(*args, **kwargs)
        hidden, weights = enter(hidden, self.group), enter(weights, self.group)
        experts_per_rank = self.num_experts // self.group.size()
        local_experts = chosen_experts - self.group.rank() * experts_per_rank
        is_own = (local_experts >= 0) & (local_experts < experts_per_rank)
        tokens = torch.where(is_own)[0]
        expert_outputs = self.computed(
            hidden[tokens], local_experts[is_own], weights[is_own], 1
        )
        return leave(
            hidden.new_zeros(hidden.shape).index_add(
                0, tokens, expert_outputs.to(hidden.dtype)
            ),
            self.group,
        )


def forward_of(
    layer: nn.Module,
    style: TensorStyle,
    group: dist.ProcessGroup,
    apart: RankRandomStream,
    place: tuple[SequenceRegion, bool] | None,
    number: int,
) -> forwarding.Forward:
    """Return the forward of one layer; `number` is the number of experts (`experts`)."""
    region, gathered = place or (None, False)
    sizes = matrix_of(layer)
    transposed = sizes is not None and sizes.out_dim == 1
    match style:
        case "colwise" | "colwise_gather_output" | "colwise_halves" | "colwise_thirds":
            colwise = Colwise(group, apart, region)
            if style in dict(BLOCKS):
                colwise = ColwiseBlocks(group, apart, region)
                colwise.blocks = dict(BLOCKS)[style]
            elif style == "colwise_gather_output":
                colwise.output = "whole"
            colwise.gathered, colwise.transposed = gathered, transposed
            return colwise
        case "rowwise" | "rowwise_split_input":
            rowwise = Rowwise(group, apart, region)
            rowwise.whole_input, rowwise.transposed = (
                style == "rowwise_split_input",
                transposed,
            )
            return rowwise
        case "embedding_rowwise":
            return VocabularyRows(group, apart)
        case "embedding_colwise":
            return TableColumns(group, apart)
        case "experts":
            return SplitExperts(group, number)
        case "replicate" | "replicate_sum_gradients":
            raise AssertionError(f"{style} does not split a layer")
        case other:
            assert_never(other)
