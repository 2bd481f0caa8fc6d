"""Forwards of layers that are split over tensor-parallel ranks."""

from __future__ import annotations

from typing import Any, assert_never

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from hasten.config.sections.parallel import TensorStyle
from hasten.errors import StepError
from hasten.modules import forwarding
from hasten.strategies.experts.strategy import CalledExperts
from hasten.strategies.tensor.layers import matrix_of
from hasten.strategies.tensor.ops import (
    RankRandomStream,
    enter_region,
    gather_output,
    leave_region,
    split_input,
)


class SplitForward(forwarding.Forward):
    """Forward of a layer of which this rank holds a shard."""

    tag = "tensor"
    transposed = False
    """The layer stores its weight as [inputs, outputs]."""

    def __init__(
        self, process_group: dist.ProcessGroup, rank_stream: RankRandomStream
    ) -> None:
        self.group = process_group
        self.rank_stream = rank_stream

    def local_parameter(self, name: str) -> Tensor | None:
        """Return this rank's shard of a parameter, differentiable; None if the layer lacks the parameter."""
        parameter: Tensor | None = getattr(self.module, name)
        if isinstance(parameter, DTensor):
            return parameter.to_local()
        return parameter

    def local_weight(self) -> Tensor:
        """Return this rank's shard of the weight as [outputs, inputs], differentiable."""
        weight = self.local_parameter("weight")
        assert weight is not None, "a linear layer has a weight"
        return weight.t() if self.transposed else weight

    def apply_with(self, tensor: Tensor, **replacements: Tensor | int | None) -> Tensor:
        """Call the module's overridden forward on `x`, with shards in place of its parameters."""
        module_dict = self.module.__dict__
        try:
            # an entry of the module's __dict__ takes precedence over the parameter
            module_dict.update(replacements)
            output: Tensor = self.inner(tensor)
            return output
        finally:
            for name in replacements:
                if name in self.module._parameters:
                    module_dict.pop(name, None)

    def multiply_by(
        self, tensor: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        """Multiply by rows or columns of the weight, with the forward of the layer's class."""
        if (
            isinstance(self.module, nn.Linear)
            and type(self.module).forward is not nn.Linear.forward
        ):
            return self.apply_with(tensor, weight=weight, bias=bias)
        return F.linear(tensor, weight, bias)


class Colwise(SplitForward):
    """Forward that computes this rank's output features from the whole input."""

    gathers_output = False

    def __call__(self, tensor: Tensor) -> Tensor:
        weight = self.local_weight()
        bias = self.local_parameter("bias")
        tensor = enter_region(tensor, self.group)
        if self.gathers_output:
            late_head = forwarding.find(self.module, forwarding.LateHead.tag)
            if isinstance(late_head, forwarding.LateHead):
                return late_head.split_logits(tensor, weight, bias, self.group)
        out = self.multiply_by(tensor, weight, bias)
        if self.gathers_output:
            return gather_output(out, -1, self.group)
        self.rank_stream.begin_stream(self.module)
        return out


class Rowwise(SplitForward):
    """Forward that computes the contribution of this rank's input features; the results are summed over ranks."""

    whole_input = False

    def __call__(self, tensor: Tensor) -> Tensor:
        weight = self.local_weight()
        bias = self.local_parameter("bias")
        if self.whole_input:
            width = tensor.shape[-1] // self.group.size()
        else:
            width = tensor.shape[-1]
        if width != weight.shape[-1]:
            raise StepError(
                f"a {type(self.module).__name__} split rowwise over {self.group.size()} ranks got {tensor.shape[-1]} features instead of the "
                f"{weight.shape[-1]} of one rank, so its input is not the output of a layer split colwise. Name the layers in tp_plan: "
                "'rowwise_split_input' for a layer with a whole input, 'replicate' for one that must not be split."
            )
        self.rank_stream.end_stream()
        if self.whole_input:
            input_part = split_input(tensor, -1, self.group)
        else:
            input_part = tensor
        output = leave_region(self.multiply_by(input_part, weight, None), self.group)
        return output if bias is None else output + bias.to(output.dtype)


class _SplitEmbedding(SplitForward):
    """Forward of an embedding of which this rank holds some rows or columns."""

    def looked_up(self, tokens: Tensor, weight: Tensor, padding: int | None) -> Tensor:
        """Look up tokens in a shard of the table, with the forward of the embedding's class."""
        if type(self.module).forward is nn.Embedding.forward:
            return F.embedding(tokens, weight, padding)
        whole_padding = self.module.padding_idx
        try:
            return self.apply_with(tokens, weight=weight, padding_idx=padding)
        finally:
            self.module.__dict__["padding_idx"] = whole_padding


class VocabularyRows(_SplitEmbedding):
    """Embedding lookup of tokens whose rows this rank holds; the results are summed over ranks."""

    def __call__(self, tokens: Tensor) -> Tensor:
        weight = self.local_parameter("weight")
        assert weight is not None, "an embedding has a table"
        assert isinstance(self.module, nn.Embedding), "the plan was checked"
        first_row = self.group.rank() * weight.shape[0]
        local_tokens = tokens - first_row
        is_elsewhere = (local_tokens < 0) | (local_tokens >= weight.shape[0])
        padding = self.module.padding_idx
        if padding is None or not 0 <= padding - first_row < weight.shape[0]:
            own_padding = None
        else:
            own_padding = padding - first_row
        rows = self.looked_up(
            local_tokens.masked_fill(is_elsewhere, 0), weight, own_padding
        )
        return leave_region(rows.masked_fill(is_elsewhere.unsqueeze(-1), 0), self.group)


class TableColumns(_SplitEmbedding):
    """Embedding lookup in this rank's columns of a table."""

    def __call__(self, tokens: Tensor) -> Tensor:
        weight = self.local_parameter("weight")
        assert weight is not None, "an embedding has a table"
        assert isinstance(self.module, nn.Embedding), "the plan was checked"
        return self.looked_up(tokens, weight, self.module.padding_idx)


class SplitExperts(CalledExperts):
    """Forward that computes this rank's experts for the tokens that chose them; the results are summed over ranks."""

    tag = "tensor"

    # Any: three tensors, by position or name
    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        hidden, chosen_experts, weights = self.bind_arguments(*args, **kwargs)
        hidden = enter_region(hidden, self.group)
        weights = enter_region(weights, self.group)
        experts_per_rank = self.num_experts // self.group.size()
        local_experts = chosen_experts - self.group.rank() * experts_per_rank
        is_own = (local_experts >= 0) & (local_experts < experts_per_rank)
        tokens = torch.where(is_own)[0]
        expert_outputs = self.compute_experts(
            hidden[tokens], local_experts[is_own], weights[is_own], 1
        )
        return leave_region(
            hidden.new_zeros(hidden.shape).index_add(
                0, tokens, expert_outputs.to(hidden.dtype)
            ),
            self.group,
        )


class CommonDropout(forwarding.Forward):
    """Forward of a dropout inside a split region whose input is whole: it drops the same elements on every rank."""

    tag = "common dropout"

    def __init__(self, rank_stream: RankRandomStream) -> None:
        self.rank_stream = rank_stream

    # Any: the arguments and the result of a dropout
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self.rank_stream.paused():
            return self.inner(*args, **kwargs)


class SummedGradients(forwarding.Forward):
    """Forward of a whole layer that sees this rank's heads: its gradients are summed over ranks."""

    tag = "summed gradients"

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        self.group = process_group

    # Any: the user's arguments and outputs
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module_dict = self.module.__dict__
        names = []
        for name, value in self.module.named_parameters(recurse=False):
            if value.requires_grad:
                names.append(name)
        try:
            # an entry of the module's __dict__ takes precedence over the parameter
            for name in names:
                module_dict[name] = enter_region(
                    self.module.get_parameter(name), self.group
                )
            return self.inner(*args, **kwargs)
        finally:
            for name in names:
                module_dict.pop(name, None)


def forward_of(
    layer: nn.Module,
    tensor_style: TensorStyle,
    process_group: dist.ProcessGroup,
    rank_stream: RankRandomStream,
    num_experts: int,
) -> forwarding.Forward:
    """Return the forward of one layer; `number` is the number of experts (`experts`)."""
    sizes = matrix_of(layer)
    transposed = sizes is not None and sizes.out_dim == 1
    match tensor_style:
        case "colwise" | "colwise_gather_output":
            colwise = Colwise(process_group, rank_stream)
            colwise.gathers_output = tensor_style == "colwise_gather_output"
            colwise.transposed = transposed
            return colwise
        case "rowwise" | "rowwise_split_input":
            rowwise = Rowwise(process_group, rank_stream)
            rowwise.whole_input = tensor_style == "rowwise_split_input"
            rowwise.transposed = transposed
            return rowwise
        case "embedding_rowwise":
            return VocabularyRows(process_group, rank_stream)
        case "embedding_colwise":
            return TableColumns(process_group, rank_stream)
        case "experts":
            return SplitExperts(process_group, num_experts)
        case "replicate" | "replicate_sum_gradients":
            raise AssertionError(f"{tensor_style} does not split a layer")
        case other:
            assert_never(other)
