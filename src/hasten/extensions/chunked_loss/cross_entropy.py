"""Cross entropy of a linear head, computed for a few tokens at a time, so that the logits of a batch never exist at once.

A batch of 16 384 tokens and a vocabulary of 131 072 has 8.6 GB of float32 logits, and their gradient as much again. Here the
head is multiplied by a chunk of tokens, and the chunk's loss and gradients are computed before the next chunk's logits are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn import functional as F

from hasten.errors import ArgumentError, ConfigError, StepError

# Any in this file: the context and the gradients of torch.autograd.Function, which torch leaves untyped.
# Records are named tuples: torch.compile does not trace the construction of frozen dataclasses.
Reduction = Literal["mean", "sum", "none"]
_SMALLEST: Final = 128
"""Tokens below which a chunk is not divided further: smaller products do not use the device well."""


class LogitsChange(NamedTuple):
    """Change that a model makes to its logits: `outer_scale * tanh(inner_scale * logits)`, or `outer_scale * logits` without `capped`."""

    inner_scale: float = 1.0
    capped: bool = False
    outer_scale: float = 1.0

    def add_scale(self, factor: float) -> LogitsChange:
        """Return this change followed by a multiplication."""
        return LogitsChange(
            inner_scale=self.inner_scale,
            capped=self.capped,
            outer_scale=self.outer_scale * factor,
        )

    def add_tanh(self) -> LogitsChange | None:
        """Return this change followed by a hyperbolic tangent; None after an earlier one."""
        if self.capped:
            return None
        return LogitsChange(inner_scale=self.outer_scale, capped=True)

    def change_logits(self, logits: Tensor) -> Tensor:
        """Return the changed logits, differentiable."""
        if self.capped:
            return (logits * self.inner_scale).tanh() * self.outer_scale
        if self.outer_scale == 1.0:
            return logits
        return logits * self.outer_scale

    def change_logits_(self, logits: Tensor) -> Tensor:
        """Change the logits in place; returns them."""
        if self.capped:
            logits.mul_(self.inner_scale).tanh_()
        if self.outer_scale == 1.0:
            return logits
        return logits.mul_(self.outer_scale)

    def chain_gradient_(self, grad: Tensor, changed_logits: Tensor | None) -> Tensor:
        """Turn the gradient of the changed logits into that of the logits, in place; returns it."""
        if self.capped:
            assert changed_logits is not None, (
                "the changed logits of a capped chunk are kept"
            )
            slope = changed_logits.div_(self.outer_scale).square_().neg_().add_(1)
            grad.mul_(slope).mul_(self.inner_scale)
        if self.outer_scale == 1.0:
            return grad
        return grad.mul_(self.outer_scale)


class _LossSettings(NamedTuple):
    """Settings of one computation: dtype of the products, rows of a chunk, smoothing, and the ranks of a split vocabulary."""

    compute: torch.dtype
    rows: int
    smoothing: float = 0.0
    change: LogitsChange = LogitsChange()
    vocabulary: int = 0
    first: int = 0
    """First vocabulary entry of this rank's rows of the weight."""
    group: dist.ProcessGroup | None = None

    @property
    def sums(self) -> torch.dtype:
        """Dtype of the softmax and of sums over chunks."""
        return torch.promote_types(self.compute, torch.float32)

    def cast_weights(
        self, weight: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Return weight and bias in the dtype of the products."""
        if bias is not None:
            bias = bias.to(self.compute)
        return weight.to(self.compute), bias

    def split_rows(self, num_tokens: int) -> Iterator[slice]:
        """Yield the row ranges of `number` tokens."""
        for start in range(0, num_tokens, self.rows):
            yield slice(start, min(start + self.rows, num_tokens))


class _LossChunk(NamedTuple):
    """Losses of a chunk of tokens, and what its gradient is computed from."""

    losses: Tensor
    shares: Tensor
    """exp(logits - maximum) of this rank's entries."""
    total: Tensor
    """Sum of the shares over the whole vocabulary."""
    local_target: Tensor
    is_own_target: Tensor | None
    changed_logits: Tensor | None

    def gradient_(self, factors: Tensor, settings: _LossSettings) -> Tensor:
        """Return the gradient of `factors * losses` with respect to the logits, in the memory of the shares."""
        logit_grad = self.shares.mul_((factors / self.total).unsqueeze(-1))
        if settings.smoothing:
            logit_grad.sub_(
                (factors * (settings.smoothing / settings.vocabulary)).unsqueeze(-1)
            )
        target_factors = factors * (settings.smoothing - 1)
        if self.is_own_target is not None:
            target_factors = target_factors.masked_fill(~self.is_own_target, 0)
        logit_grad.scatter_add_(
            -1, self.local_target.unsqueeze(-1), target_factors.unsqueeze(-1)
        )
        return settings.change.chain_gradient_(logit_grad, self.changed_logits)


def _without_autocast(x: Tensor) -> torch.autocast:
    """Return a context manager without autocast: dtypes are chosen here."""
    return torch.autocast(x.device.type, enabled=False)


def _chunk_losses(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    settings: _LossSettings,
) -> _LossChunk:
    """Compute the losses of a chunk of tokens. Ranks: those that share the vocabulary."""
    logits = F.linear(hidden.to(settings.compute), weight, bias)
    logits = settings.change.change_logits_(logits.to(settings.sums))
    changed_logits = None
    if settings.change.capped:
        changed_logits = logits.clone()
    largest_logit = logits.amax(-1)
    if settings.group is not None:
        dist.all_reduce(largest_logit, dist.ReduceOp.MAX, group=settings.group)
    local_target, is_own = _locate_targets(target, weight.shape[0], settings)
    target_logits = logits.gather(-1, local_target.unsqueeze(-1)).squeeze(-1)
    if is_own is not None:
        target_logits = target_logits.masked_fill(~is_own, 0)
    if settings.smoothing:
        logit_sums = logits.sum(-1)
    else:
        logit_sums = torch.zeros_like(target_logits)
    shares = logits.sub_(largest_logit.unsqueeze(-1)).exp_()
    vocabulary_sums = torch.stack([shares.sum(-1), target_logits, logit_sums])
    if settings.group is not None:
        dist.all_reduce(vocabulary_sums, group=settings.group)
    losses = (
        vocabulary_sums[0].log()
        + largest_logit
        - (1 - settings.smoothing) * vocabulary_sums[1]
    )
    if settings.smoothing:
        losses = losses - vocabulary_sums[2] * (
            settings.smoothing / settings.vocabulary
        )
    return _LossChunk(
        losses, shares, vocabulary_sums[0], local_target, is_own, changed_logits
    )


def _locate_targets(
    target: Tensor, num_rows: int, settings: _LossSettings
) -> tuple[Tensor, Tensor | None]:
    """Return the targets as rows of this rank's weight, and which of them it holds; None if it holds all."""
    if settings.group is None:
        return target, None
    local_target = target - settings.first
    return local_target.clamp(0, num_rows - 1), (local_target >= 0) & (
        local_target < num_rows
    )


class _Gradients:
    """Gradients of hidden states, weight and bias, summed over chunks."""

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        needs_gradient: tuple[bool, ...],
        settings: _LossSettings,
    ) -> None:
        self._settings = settings
        self._needs_gradient = needs_gradient
        self.hidden = torch.empty_like(hidden) if needs_gradient[0] else None
        self.weight: Tensor | None = None
        if needs_gradient[1]:
            self.weight = torch.zeros_like(weight, dtype=settings.sums)
        self.bias: Tensor | None = None
        if bias is not None and needs_gradient[2]:
            self.bias = torch.zeros_like(bias, dtype=settings.sums)

    def add_chunk(
        self, rows: slice, logit_grad: Tensor, hidden: Tensor, weight: Tensor
    ) -> None:
        """Add the contribution of a chunk, from the gradient of its logits."""
        if self.bias is not None:
            self.bias += logit_grad.sum(0)
        logit_grad = logit_grad.to(self._settings.compute)
        if self.hidden is not None:
            self.hidden[rows] = logit_grad @ weight
        if self.weight is not None:
            self.weight += logit_grad.t() @ hidden[rows].to(self._settings.compute)


class _WeightedSum(torch.autograd.Function):
    """Sum of the losses of all tokens, each multiplied by its factor; the gradients are computed in the forward pass.

    They are those of the sum, so that float16 keeps them: a mean divides the sum outside, after a loss scale has multiplied it.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        factors: Tensor,
        settings: _LossSettings,
        needs_gradient: tuple[bool, ...],
    ) -> Tensor:
        cast_weight, cast_bias = settings.cast_weights(weight, bias)
        loss_sum = torch.zeros((), dtype=settings.sums, device=hidden.device)
        grads = _Gradients(hidden, weight, bias, needs_gradient, settings)
        with _without_autocast(hidden):
            for rows in settings.split_rows(hidden.shape[0]):
                chunk = _chunk_losses(
                    hidden[rows], cast_weight, cast_bias, target[rows], settings
                )
                loss_sum += (chunk.losses * factors[rows]).sum()
                if any(needs_gradient):
                    grads.add_chunk(
                        rows,
                        chunk.gradient_(factors[rows], settings),
                        hidden,
                        cast_weight,
                    )
        ctx.save_for_backward(grads.hidden, grads.weight, grads.bias)
        ctx.dtypes = weight.dtype, None if bias is None else bias.dtype
        return loss_sum

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        hidden, weight, bias = ctx.saved_tensors
        of_weight, of_bias = ctx.dtypes
        return (
            None if hidden is None else (hidden * grad).to(hidden.dtype),
            None if weight is None else (weight * grad).to(of_weight),
            None if bias is None else (bias * grad).to(of_bias),
            *[None] * 4,
        )


class _TokenLosses(torch.autograd.Function):
    """Loss of each token; the backward pass multiplies the head again, because only it knows the tokens' factors."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        settings: _LossSettings,
        needs_gradient: tuple[bool, ...],
    ) -> Tensor:
        cast_weight, cast_bias = settings.cast_weights(weight, bias)
        with _without_autocast(hidden):
            loss_parts = []
            for rows in settings.split_rows(hidden.shape[0]):
                chunk = _chunk_losses(
                    hidden[rows], cast_weight, cast_bias, target[rows], settings
                )
                loss_parts.append(chunk.losses)
        ctx.save_for_backward(hidden, weight, bias, target)
        ctx.how = settings
        ctx.wanted = needs_gradient
        if loss_parts:
            return torch.cat(loss_parts)
        return torch.zeros(0, dtype=settings.sums, device=hidden.device)

    @staticmethod
    def backward(ctx: Any, loss_grad: Tensor) -> Any:
        hidden, weight, bias, target = ctx.saved_tensors
        settings: _LossSettings = ctx.how
        cast_weight, cast_bias = settings.cast_weights(weight, bias)
        grads = _Gradients(hidden, weight, bias, ctx.wanted, settings)
        with _without_autocast(hidden):
            for rows in settings.split_rows(hidden.shape[0]):
                chunk = _chunk_losses(
                    hidden[rows], cast_weight, cast_bias, target[rows], settings
                )
                grads.add_chunk(
                    rows,
                    chunk.gradient_(loss_grad[rows].to(settings.sums), settings),
                    hidden,
                    cast_weight,
                )
        return (
            grads.hidden,
            None if grads.weight is None else grads.weight.to(weight.dtype),
            None if grads.bias is None or bias is None else grads.bias.to(bias.dtype),
            *[None] * 3,
        )


class _SumGradient(torch.autograd.Function):
    """Identity whose gradient is summed over the ranks that share the vocabulary."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        total = grad.contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


@dataclass(frozen=True, slots=True, kw_only=True)
class LossOptions:
    """Options of `cross_entropy` as torch defines them, and the number of tokens in a chunk."""

    ignore_index: int = -100
    label_smoothing: float = 0.0
    reduction: Reduction = "mean"
    chunk_tokens: int | None = None
    """Tokens whose logits exist at once; by default chosen from the head's size."""

    def __post_init__(self) -> None:
        if self.reduction not in get_args(Reduction):
            raise ConfigError(
                f"reduction={self.reduction!r} is unknown, so that the loss has no definition; use one of {get_args(Reduction)}."
            )
        if not 0.0 <= self.label_smoothing <= 1.0:
            raise ConfigError(
                f"label_smoothing={self.label_smoothing} is not a share of the probability; give a number between 0 and 1."
            )
        if self.chunk_tokens is not None and self.chunk_tokens < 1:
            raise ConfigError(
                f"chunk_tokens={self.chunk_tokens} leaves no token in a chunk; give a positive number, or None to have it chosen."
            )


class Head(NamedTuple):
    """This rank's part of a linear head: its weight and bias, the ranks it is split over, and the dtype of its products."""

    weight: Tensor
    bias: Tensor | None
    group: dist.ProcessGroup | None
    vocabulary: int
    compute: torch.dtype
    change: LogitsChange = LogitsChange()


def compute_loss(
    hidden: Tensor,
    head: Head,
    target: Tensor,
    options: LossOptions,
    token_weights: Tensor | None = None,
) -> Tensor:
    """Return the cross entropy of hidden states `[tokens, width]`; a split head's gradient of `hidden` is this rank's part.

    Ranks: those that share the vocabulary.
    """
    _check_present(head)
    is_counted = target != options.ignore_index
    settings = _choose_settings(hidden, head, options)
    known_target = target.masked_fill(~is_counted, 0)
    needs_gradient = (
        hidden.requires_grad,
        head.weight.requires_grad,
        head.bias is not None and head.bias.requires_grad,
    )
    if not torch.is_grad_enabled():
        needs_gradient = (False, False, False)
    weighs_with_gradient = (
        token_weights is not None
        and token_weights.requires_grad
        and torch.is_grad_enabled()
    )
    factors = is_counted.to(settings.sums)
    # a class that no rank holds; a whole head's own look-up notices it
    if settings.group is not None:
        is_outside = is_counted & ((target < 0) | (target >= head.vocabulary))
        factors = factors.masked_fill(is_outside, torch.nan)
    if token_weights is not None:
        factors = factors * token_weights.to(settings.sums)
    if options.reduction == "none" or weighs_with_gradient:
        losses: Tensor = _TokenLosses.apply(
            hidden, head.weight, head.bias, known_target, settings, needs_gradient
        )  # type: ignore[no-untyped-call]  # torch leaves it untyped
        losses = losses.masked_fill(~is_counted, 0) * factors
        if options.reduction == "none":
            return losses
        loss_sum = losses.sum()
    else:
        loss_sum = _WeightedSum.apply(
            hidden,
            head.weight,
            head.bias,
            known_target,
            factors,
            settings,
            needs_gradient,
        )  # type: ignore[no-untyped-call]
    if options.reduction == "mean":
        return loss_sum / factors.sum()
    return loss_sum


def _choose_settings(hidden: Tensor, head: Head, options: LossOptions) -> _LossSettings:
    num_tokens, width = hidden.shape
    chunk_rows = options.chunk_tokens
    if chunk_rows is None:
        # as many tokens as make the chunk's logits about as large as half of the weight's gradient, and at least 8 chunks
        chunk_rows = min(max(512, width // 2), max(_SMALLEST, -(-num_tokens // 8)))
    num_ranks = 1 if head.group is None else head.group.size()
    if head.group is None:
        first_entry = 0
    else:
        first_entry = min(
            head.group.rank() * -(-head.vocabulary // num_ranks), head.vocabulary
        )
    return _LossSettings(
        compute=head.compute,
        rows=chunk_rows,
        smoothing=options.label_smoothing,
        change=head.change,
        vocabulary=head.vocabulary,
        first=first_entry,
        group=head.group if num_ranks > 1 else None,
    )


def _check_present(head: Head) -> None:
    if torch.compiler.is_compiling() or head.weight.is_meta:
        return
    if head.weight.numel() == 0 or head.weight.untyped_storage().size() == 0:
        raise StepError(
            f"the weight of the head (a vocabulary of {head.vocabulary}) is not on this rank when the loss is computed: its "
            "shards were freed when the head returned. Leave the head in the root's shard group (auto_wrap_policy of "
            "the blocks only), or do without the chunked loss."
        )


def compute_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype in which a linear layer multiplies `x` here: autocast's, or its own."""
    device_type = x.device.type
    if torch.is_autocast_enabled(device_type) and x.dtype != torch.float64:
        return torch.get_autocast_dtype(device_type)
    return x.dtype


class ChunkedCrossEntropyLoss(nn.Module):
    """Cross entropy of `hidden @ weight.T + bias`, computed for `chunk_tokens` tokens at a time.

    The options are those of `torch.nn.CrossEntropyLoss`, and so are losses and gradients, within rounding. A weight that is a
    DTensor with its vocabulary sharded over the mesh axis `vocabulary_axis` stays sharded: every rank computes its entries.
    """

    def __init__(
        self,
        *,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        reduction: Reduction = "mean",
        chunk_tokens: int | None = None,
        vocabulary_axis: str = "tp",
    ) -> None:
        super().__init__()
        self.options = LossOptions(
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
            reduction=reduction,
            chunk_tokens=chunk_tokens,
        )
        self.vocabulary_axis = vocabulary_axis

    def forward(
        self,
        hidden: Tensor,
        weight: Tensor,
        target: Tensor,
        bias: Tensor | None = None,
        token_weights: Tensor | None = None,
    ) -> Tensor:
        """Return the loss of hidden states `[..., width]` for a head `[vocabulary, width]` and class indices `[...]`.

        `token_weights` has the shape of `target` and multiplies the tokens' losses; "mean" divides by the sum of the
        weights of tokens that are not ignored. "none" returns a loss for each token, in the shape of `target`.

        Ranks: those that share the vocabulary; they pass the same hidden states and targets.
        Raises: ArgumentError for shapes that do not fit; ConfigError for a weight sharded over another axis.
        """
        _check_shapes(hidden, weight, target, bias, token_weights)
        head, hidden = self._make_head(hidden, weight, bias)
        flat_weights = None if token_weights is None else token_weights.flatten()
        try:
            loss = compute_loss(
                hidden.flatten(0, -2),
                head,
                target.flatten(),
                self.options,
                flat_weights,
            )
        except (RuntimeError, IndexError) as error:
            if "out of bounds" not in str(error):
                raise
            raise ArgumentError(
                f"a target is not one of the head's {head.vocabulary} classes ({error}), so that its token has no loss. Mark "
                f"tokens to leave out with ignore_index, which is {self.options.ignore_index}."
            ) from error
        if self.options.reduction == "none":
            return loss.view(target.shape)
        return loss

    def _make_head(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None
    ) -> tuple[Head, Tensor]:
        vocabulary = weight.shape[0]
        if isinstance(hidden, DTensor):
            hidden = hidden.redistribute(
                placements=[Replicate()] * hidden.device_mesh.ndim
            ).to_local()
        if not isinstance(weight, DTensor):
            return Head(weight, bias, None, vocabulary, compute_dtype(hidden)), hidden
        mesh = weight.device_mesh
        axis_names = mesh.mesh_dim_names or ()
        if axis_names != (self.vocabulary_axis,) or weight.placements != (Shard(0),):
            raise ConfigError(
                f"the head's weight is a DTensor with placements {weight.placements} over the mesh axes {axis_names or 'without names'}; "
                f"only a vocabulary sharded over the axis {self.vocabulary_axis!r}, whose ranks hold the same tokens, can be "
                "summed over ranks. Under FSDP2 compute the loss inside the model's forward, where the weight is whole; with a "
                "tensor-parallel axis of another name give vocabulary_axis=."
            )
        group = mesh.get_group()
        if (group.size() - 1) * -(-vocabulary // group.size()) >= vocabulary:
            raise ConfigError(
                f"a vocabulary of {vocabulary} leaves the last of {group.size()} ranks without an entry; use fewer ranks, or "
                "pad the vocabulary to a multiple of their number."
            )
        bias_part = bias.to_local() if isinstance(bias, DTensor) else bias
        if bias_part is not None and bias_part.shape[0] != weight.to_local().shape[0]:
            raise ConfigError(
                f"the head's weight is sharded over {group.size()} ranks and its bias is not: this rank holds {weight.to_local().shape[0]} "
                f"rows of the one and {bias_part.shape[0]} of the other. Shard the bias like the weight."
            )
        if group.size() > 1 and hidden.requires_grad:
            hidden = _SumGradient.apply(hidden, group)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        return Head(
            weight.to_local(), bias_part, group, vocabulary, compute_dtype(hidden)
        ), hidden


def _check_shapes(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    token_weights: Tensor | None,
) -> None:
    problem = ""
    if weight.ndim != 2 or hidden.ndim < 2 or hidden.shape[-1] != weight.shape[1]:
        problem = f"hidden states {list(hidden.shape)} do not fit a weight {list(weight.shape)}"
    elif target.shape != hidden.shape[:-1] or target.is_floating_point():
        problem = f"targets {list(target.shape)} of {target.dtype} are not class indices of hidden states {list(hidden.shape)}"
    elif bias is not None and bias.shape != weight.shape[:1]:
        problem = (
            f"a bias {list(bias.shape)} does not fit a weight {list(weight.shape)}"
        )
    elif token_weights is not None and token_weights.shape != target.shape:
        problem = f"token weights {list(token_weights.shape)} do not have the shape of the targets {list(target.shape)}"
    if problem:
        raise ArgumentError(
            f"{problem}, so that tokens and logits cannot be matched. Give hidden states [..., width], a weight [vocabulary, "
            "width], and class indices (and token weights) [...]; shift labels before the call."
        )
