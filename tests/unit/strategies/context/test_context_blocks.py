"""Attention to parts of the keys, merged, is attention to all; fused and plain arithmetic agree."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from hasten.strategies.context import attention as context_blocks
from hasten.strategies.context.attention import AttentionBlock, attend, attend_backward, merge


def block(queries: int, keys: int, causal: bool, dtype: torch.dtype = torch.float32, width: int = 8) -> AttentionBlock:
    g = torch.Generator().manual_seed(queries + keys)
    q, k, v = (torch.randn(2, 3, n, width, generator=g).to(dtype) for n in (queries, keys, keys))
    return AttentionBlock(q, k, v, causal, 1 / math.sqrt(width))


@pytest.mark.parametrize(("queries", "keys", "causal"), [(4, 4, True), (5, 7, False), (1, 3, False), (600, 600, True)])
def test_fused_and_plain_arithmetic_agree(queries: int, keys: int, causal: bool) -> None:
    given = block(queries, keys, causal)
    grad = torch.randn(given.query.shape, generator=torch.Generator().manual_seed(1))
    out, lse = attend(given)
    plain_out, plain_lse = context_blocks._plain(given)
    torch.testing.assert_close(out, plain_out, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse, plain_lse, rtol=1e-5, atol=1e-5)
    for fused, plain in zip(
        attend_backward(given, grad, out, lse), context_blocks._plain_backward(given, grad, out, lse), strict=True
    ):
        torch.testing.assert_close(fused, plain, rtol=1e-4, atol=1e-5)
    leaves = [t.clone().requires_grad_() for t in (given.query, given.key, given.value)]
    expected = F.scaled_dot_product_attention(leaves[0], leaves[1], leaves[2], is_causal=causal, scale=given.scale)
    (expected * grad).sum().backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    torch.testing.assert_close(out, expected.detach(), rtol=1e-5, atol=1e-5)
    for mine, leaf in zip(attend_backward(given, grad, out, lse), leaves, strict=True):
        torch.testing.assert_close(mine, leaf.grad, rtol=1e-4, atol=1e-5)


def test_parts_merge_in_any_order() -> None:
    whole = block(4, 12, False)
    expected, total = attend(whole)
    parts = [
        AttentionBlock(whole.query, k, v, False, whole.scale)
        for k, v in zip(whole.key.chunk(3, 2), whole.value.chunk(3, 2), strict=True)
    ]
    for order in ((0, 1, 2), (2, 0, 1), (1, 2, 0)):
        out, lse = torch.zeros_like(expected), torch.full(total.shape, float("-inf"))
        for index in order:
            out, lse = merge(out, lse, *attend(parts[index]))
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(lse, total, rtol=1e-5, atol=1e-6)


def test_values_of_another_width_and_half_precision_are_computed_in_float32() -> None:
    for dtype, width in product((torch.float32, torch.bfloat16), (8, 5)):
        given = block(4, 6, False, dtype)
        value = torch.randn(2, 3, 6, width, generator=torch.Generator().manual_seed(0)).to(dtype)
        other = AttentionBlock(given.query, given.key, value, False, given.scale)
        out, lse = attend(other)
        fused = width == given.query.shape[-1]  # a fused kernel writes what it was given, and is merged in float32
        assert (out.dtype, lse.dtype, out.shape[-1]) == (dtype if fused else torch.float32, torch.float32, width)
        assert merge(out, lse, out, lse)[0].dtype == torch.float32
        tensors: tuple[Tensor, ...] = (other.query.float(), other.key.float(), other.value.float())
        expected = F.scaled_dot_product_attention(tensors[0], tensors[1], tensors[2], scale=given.scale)
        torch.testing.assert_close(out.float(), expected, rtol=0, atol=1e-5 if dtype == torch.float32 else 2e-2)
