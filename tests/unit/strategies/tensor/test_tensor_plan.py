"""Tensor-parallel plans: those that models carry, those of users, and what is refused with a plan that works."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor, nn

from hasten.errors import ConfigError, PrepareError
from hasten.strategies.tensor.plan import decide_split


class Attention(nn.Module):
    """Attention with fewer heads of keys."""

    def __init__(self, width: int = 8, heads: int = 4, key_heads: int = 4) -> None:
        super().__init__()
        self.num_heads, self.head_dim = heads, width // heads
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, key_heads * self.head_dim)
        self.value = nn.Linear(width, key_heads * self.head_dim)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        query_heads, key_heads, value_heads = (
            layer(x).view(*x.shape[:2], -1, self.head_dim).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        mixed = nn.functional.scaled_dot_product_attention(
            query_heads, key_heads, value_heads, enable_gqa=True
        )
        output: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return output


class Gated(nn.Module):
    """A perceptron whose narrowing layer is registered between the widening ones."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.w1, self.w2, self.w3 = (
            nn.Linear(width, 16),
            nn.Linear(16, width),
            nn.Linear(width, 16),
        )


class Block(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)


def model(*layer_kinds: Any) -> nn.Module:
    return nn.ModuleList(
        Block(*(layer_kind() for layer_kind in layer_kinds)) for _ in range(2)
    )


PLAN = {
    "*.query": "colwise",
    "*.key": "colwise",
    "*.value": "colwise",
    "*.out": "rowwise",
}


def test_heads_that_do_not_divide_are_refused() -> None:
    styles = set(decide_split(model(Attention), PLAN, (), 4).styles.values())
    assert styles == {"colwise", "rowwise"}
    with pytest.raises(
        ConfigError, match=r"does not divide the 2 heads of .*key.*one of \[1, 2\]"
    ):
        decide_split(model(lambda: Attention(key_heads=2)), PLAN, (), 4)
    with pytest.raises(ConfigError, match=r"tp_size=3 does not divide the 4 heads"):
        decide_split(model(lambda: Attention(width=12, key_heads=2)), PLAN, (), 3)


class Joined(nn.Module):
    """Attention with one layer for queries, keys and values, in an order that only its code knows."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 4
        self.qkv, self.proj = nn.Linear(8, 24), nn.Linear(8, 8)


def test_a_model_without_a_plan_is_refused() -> None:
    net = model(Joined)
    with pytest.raises(
        PrepareError, match=r"ModuleList has no tensor-parallel plan.*tp_plan=\{"
    ):
        decide_split(net, "auto", (), 2)
    assert len(decide_split(net, {"*.qkv": "colwise_gather_output"}, (), 2).styles) == 2


def test_an_adapter_other_than_lora_is_refused() -> None:
    net = model(Joined)
    adapted = nn.Module()
    adapted.base_layer = net.get_submodule("0.layers.0.qkv")
    net.get_submodule("0.layers.0").qkv = adapted
    with pytest.raises(ConfigError, match=r"plain LoRA.*Leave this layer out"):
        decide_split(net, {"*.qkv": "colwise_gather_output"}, (), 2)


def test_a_carried_plan_that_cannot_be_honoured_is_refused() -> None:
    net: Any = model(Gated)
    net.tp_plan = {"*.w1": "some_other_style"}
    with pytest.raises(
        ConfigError, match=r"uses 'some_other_style' for '0.layers.0.w1', .*tp_plan=\{"
    ):
        decide_split(net, "auto", (), 2)


def test_a_plan_is_found_below_a_wrapper() -> None:
    inner: Any = model(Gated)
    inner.tp_plan = {"*.w1": "colwise", "*.w2": "rowwise", "*.w3": "colwise"}
    outer = nn.Module()
    outer.backbone = inner
    split = decide_split(outer, "auto", (), 2)
    assert split.styles["backbone.1.layers.0.w2"] == "rowwise"
    assert "the plan of" in split.source


def test_the_first_pattern_decides() -> None:
    plan = {
        "0.*.w1": "replicate",
        "*.w1": "colwise_gather_output",
        "*.w?": "rowwise_split_input",
    }
    split = decide_split(model(Gated), plan, (), 2)
    assert "0.layers.0.w1" not in split.styles
    assert split.styles["1.layers.0.w1"] == "colwise_gather_output"
    assert split.styles["1.layers.0.w2"] == "rowwise_split_input"
