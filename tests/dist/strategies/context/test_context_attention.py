"""Attention over a sequence spread over ranks equals attention in one process, forward and backward."""

from __future__ import annotations

from itertools import product
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hasten import Accelerator, TorchContextParallelConfig
from hasten.config.sections.parallel import ParallelismConfig
from hasten.errors import ConfigError, StepError
from hasten.runtime.context import ProcessContext
from hasten.testing.pool import ranks

CommStrategy = Literal["allgather", "ulysses"]
WAYS: tuple[CommStrategy, ...] = ("allgather", "ulysses")
Inputs = tuple[Tensor, Tensor, Tensor]


def accelerator(
    ctx: ProcessContext,
    comm_strategy: CommStrategy,
    balance: bool = True,
    **settings: Any,
) -> Accelerator:
    handler = TorchContextParallelConfig(
        cp_comm_strategy=comm_strategy, load_balance=balance
    )
    return Accelerator(
        parallelism_config=ParallelismConfig(
            cp_size=ctx.world.size, cp_handler=handler
        ),
        **settings,
    )


def inputs(heads: int, kv_heads: int, length: int, keys: int | None = None) -> Inputs:
    g = torch.Generator().manual_seed(length + heads)
    q = torch.randn(2, heads, length, 8, generator=g)
    k, v = (torch.randn(2, kv_heads, keys or length, 8, generator=g) for _ in range(2))
    return q, k, v


def with_gradients(attend: Any, tensors: Inputs, seed: Tensor) -> list[Tensor]:
    leaves = [t.clone().requires_grad_() for t in tensors]
    out = attend(*leaves)
    (out * seed).sum().backward()
    return [out.detach(), *(leaf.grad for leaf in leaves)]


def spread(
    cp_accelerator: Accelerator, tensors: Inputs, seed: Tensor, **options: Any
) -> list[Tensor]:
    """What the ranks compute together, gathered."""
    q, k, v, weights = *(t.clone() for t in tensors), seed.clone()
    with cp_accelerator.context_parallel(
        [q, k, v, weights], [2, 2, 2, 2], labels=None
    ) as shards:
        rank_outputs = with_gradients(
            lambda q, k, v: F.scaled_dot_product_attention(q, k, v, **options),
            (q, k, v),
            weights,
        )
        return [shards.gather(rank_output, 2) for rank_output in rank_outputs]


@ranks(2, exhaustive=(4,))
@pytest.mark.parametrize("comm_strategy", WAYS)
def test_attention_and_its_gradients_equal_one_process(
    ctx: ProcessContext, comm_strategy: CommStrategy
) -> None:
    sizes: tuple[tuple[int, int, float | None], ...] = (
        (4, 4, None),
        (8, 2, 0.3),
        (4, 1, None),
    )
    for balance, causal, (heads, kv_heads, scale) in product(
        (True, False), (True, False), sizes
    ):
        cp_accelerator = accelerator(ctx, comm_strategy, balance)
        tensors = inputs(heads, kv_heads, 16)
        seed = torch.randn(2, heads, 16, 8, generator=torch.Generator().manual_seed(7))
        options = {"is_causal": causal, "scale": scale, "enable_gqa": heads != kv_heads}
        plain = with_gradients(
            lambda *t, o=options: F.scaled_dot_product_attention(*t, **o), tensors, seed
        )
        for actual, expected in zip(
            spread(cp_accelerator, tensors, seed, **options), plain, strict=True
        ):
            torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


@ranks(2)
@pytest.mark.parametrize("comm_strategy", WAYS)
def test_queries_attend_to_another_sequence(
    ctx: ProcessContext, comm_strategy: CommStrategy
) -> None:
    tensors, seed = inputs(4, 4, 8, keys=24), torch.ones(2, 4, 8, 8)
    plain = with_gradients(F.scaled_dot_product_attention, tensors, seed)
    for actual, expected in zip(
        spread(accelerator(ctx, comm_strategy), tensors, seed), plain, strict=True
    ):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


@ranks(2)
@pytest.mark.parametrize("comm_strategy", ["allgather", "ulysses"])
def test_masks_of_keys_travel_with_the_keys(
    ctx: ProcessContext, comm_strategy: CommStrategy
) -> None:
    tensors, seed = inputs(4, 4, 8), torch.ones(2, 4, 8, 8)
    keep = torch.ones(2, 1, 1, 8, dtype=torch.bool)
    keep[0, ..., 5:] = False
    keep[1, ..., :3] = False
    for mask, causal in product(
        (keep, torch.zeros(keep.shape).masked_fill(~keep, -1e30)), (False, True)
    ):
        if causal:
            mask[..., 0] = mask[..., 7] = mask[0, ..., 0]  # every query has a key
        lower = torch.ones(8, 8, dtype=torch.bool).tril()
        full_mask = mask
        if causal:
            full_mask = (
                mask & lower
                if mask.dtype == torch.bool
                else mask.masked_fill(~lower, float("-inf"))
            )
        plain = with_gradients(
            lambda q, k, v, m=full_mask: F.scaled_dot_product_attention(q, k, v, m),
            tensors,
            seed,
        )
        q, k, v, weights, rank_mask = (
            *(t.clone() for t in tensors),
            seed.clone(),
            mask.clone(),
        )
        with accelerator(ctx, comm_strategy).context_parallel(
            [q, k, v, weights, rank_mask], [2, 2, 2, 2, 3]
        ) as shards:

            def attend(
                q: Tensor,
                k: Tensor,
                v: Tensor,
                rank_mask: Tensor = rank_mask,
                causal: bool = causal,
            ) -> Tensor:
                return F.scaled_dot_product_attention(
                    q, k, v, attn_mask=rank_mask, is_causal=causal
                )

            rank_outputs = with_gradients(attend, (q, k, v), weights)
            rank_results = [
                shards.gather(rank_output, 2) for rank_output in rank_outputs
            ]
        for gathered, expected in zip(rank_results, plain, strict=True):
            torch.testing.assert_close(gathered, expected, rtol=1e-5, atol=1e-5)


@ranks(2)
@pytest.mark.parametrize("comm_strategy", WAYS)
def test_a_causal_mask_written_out_is_recognised(
    ctx: ProcessContext, comm_strategy: CommStrategy
) -> None:
    tensors, seed = inputs(4, 4, 8), torch.ones(2, 4, 8, 8)
    plain = with_gradients(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        tensors,
        seed,
    )
    lower = torch.ones(4, 4, dtype=torch.bool).tril()
    for mask in (lower, torch.zeros(4, 4).masked_fill(~lower, float("-inf"))):
        gathered_outputs = spread(
            accelerator(ctx, comm_strategy), tensors, seed, attn_mask=mask
        )
        for gathered, expected in zip(gathered_outputs, plain, strict=True):
            torch.testing.assert_close(gathered, expected, rtol=1e-5, atol=1e-5)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 4, 16, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)
        return out


@ranks(2)
def test_torchs_own_layers_attend_over_ranks_in_training_and_evaluation(
    ctx: ProcessContext,
) -> None:
    torch.manual_seed(0)
    net, x = Encoder(), torch.randn(2, 8, 8)
    for comm_strategy, training in product(WAYS, (True, False)):
        net.train(training)
        with torch.set_grad_enabled(training):
            expected, rank_input = net(x).detach(), x.clone()
            with accelerator(ctx, comm_strategy).context_parallel(
                [rank_input], [1]
            ) as shards:
                torch.testing.assert_close(
                    shards.gather(net(rank_input)), expected, rtol=1e-5, atol=1e-5
                )


@ranks(2)
def test_what_cannot_be_right_is_refused(ctx: ProcessContext) -> None:
    cp_accelerator = accelerator(ctx, "allgather")
    with pytest.raises(
        ConfigError,
        match=r"has 6 positions .* 4 equal chunks .* Pad sequences to 8, .*one of \[1, 3\]",
    ):
        cp_accelerator.context_parallel([torch.zeros(1, 6)], [1]).__enter__()
    with pytest.raises(
        ConfigError,
        match=r"Pad sequences to 8, a multiple of 2, or set cp_size to one of \[1, 7\]",
    ):
        accelerator(ctx, "ulysses").context_parallel(
            [torch.zeros(1, 7)], [1]
        ).__enter__()
    with pytest.raises(ConfigError, match="single token"):
        accelerator(ctx, "ulysses").context_parallel(
            [torch.zeros(1, 2)], [1]
        ).__enter__()
    with pytest.raises(ConfigError, match="2 buffers and 1 sequence dim"):
        cp_accelerator.context_parallel([torch.zeros(1, 4)] * 2, [1]).__enter__()
    with pytest.raises(ConfigError, match="no dimension 2"):
        cp_accelerator.context_parallel([torch.zeros(1, 4)], [2]).__enter__()
    with pytest.raises(ConfigError, match="requires gradients"):
        cp_accelerator.context_parallel(
            [torch.zeros(1, 4, requires_grad=True)], [1]
        ).__enter__()
    with pytest.raises(ConfigError, match="is not one of the buffers"):
        cp_accelerator.context_parallel(
            [torch.zeros(1, 4)], [1], labels=torch.zeros(1, 4)
        ).__enter__()
    first, second = torch.tensor([[-100, 1, 2, 3]]), torch.tensor([[-100, -100, 2, 3]])
    with pytest.raises(ConfigError, match=r"2 buffers .* hold labels of -100"):
        cp_accelerator.context_parallel([first, second], [1, 1]).__enter__()
    empty = cp_accelerator.context_parallel([torch.zeros(1, 4)], [1])
    with (
        pytest.raises(StepError, match="no scaled_dot_product_attention was called"),
        empty,
    ):
        pass
    q = torch.randn(1, 3, 8, 4)
    divided = accelerator(ctx, "ulysses").context_parallel([q], [2])
    with (
        pytest.raises(
            ConfigError, match=r"does not divide the 3 heads .* one of \[1, 3\]"
        ),
        divided,
    ):
        F.scaled_dot_product_attention(q, q, q)
    with pytest.raises(
        ConfigError, match=r"cp_comm_strategy=ring.*use allgather, or ulysses"
    ):
        accelerator(ctx, "ring")  # type: ignore[arg-type]  # what users may still write
    with (
        pytest.raises(StepError, match="with a length of 5"),
        cp_accelerator.context_parallel([q], [2]),
    ):
        F.scaled_dot_product_attention(
            q, torch.zeros(1, 3, 5, 4), torch.zeros(1, 3, 5, 4)
        )
    with (
        pytest.raises(StepError, match="what it masks on other ranks is unknown"),
        cp_accelerator.context_parallel([q], [2]),
    ):
        F.scaled_dot_product_attention(
            q, q, q, attn_mask=torch.eye(4, dtype=torch.bool)
        )
    assert q.shape[2] == 8
    assert torch.nn.functional.scaled_dot_product_attention.__module__ != "hasten"
    with pytest.raises(ConfigError, match="attend within each rank's part"):
        accelerator(ctx, "allgather", dynamo_backend="eager")


@ranks(2)
def test_a_backward_that_comes_after_the_block_is_an_error(ctx: ProcessContext) -> None:
    table = nn.Embedding(4, 8)
    tokens = torch.tensor([[0, 1, 2, 3]])
    with accelerator(ctx, "allgather").context_parallel([tokens], [1]):
        x = table(tokens)[:, None]
        out = F.scaled_dot_product_attention(x, x, x)
    assert tokens.tolist() == [[0, 1, 2, 3]]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped


@ranks(2)
def test_buffers_that_ddp_copies_are_refused(ctx: ProcessContext) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)
            self.register_buffer("cache", torch.arange(4.0))

    cp_accelerator = accelerator(ctx, "allgather")
    net = cp_accelerator.prepare(Net())
    with pytest.raises(ConfigError, match="'cache' is a buffer of Net, and DDP copies"):
        cp_accelerator.context_parallel([net.module.cache], [0]).__enter__()


@ranks(2)
def test_named_buffers_stay_parts(ctx: ProcessContext) -> None:
    tokens, unrestored = (
        torch.arange(8.0).view(1, 1, 8, 1),
        torch.arange(8.0).view(1, 1, 8, 1),
    )
    cp_accelerator = accelerator(ctx, "allgather")
    block = cp_accelerator.context_parallel(
        [tokens, unrestored], [2, 2], labels=None, no_restore_buffers={unrestored}
    )
    with block as shards:
        F.scaled_dot_product_attention(tokens, tokens, tokens)
        expected = shards.positions(8)
    assert tokens.shape[2] == 8
    assert (
        unrestored.flatten().tolist()
        == expected.tolist()
        == ([6, 7, 0, 1], [4, 5, 2, 3])[ctx.rank]
    )


@ranks(1)
def test_one_process_is_left_alone(ctx: ProcessContext) -> None:
    single_accelerator = Accelerator(context=ctx)
    x = torch.randn(1, 1, 5, 2)
    with single_accelerator.context_parallel([x], [2]) as shards:
        assert shards.gather(x, 2) is x
        assert shards.positions(5).tolist() == [0, 1, 2, 3, 4]
    with single_accelerator.context_parallel([], []):
        pass
