"""The automatic tensor-parallel plan: what is recognised by structure, and what is left whole with a reason."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hasten.errors import ConfigError, PrepareError
from hasten.strategies.tensor.heads import use_of
from hasten.strategies.tensor.plan import decide, working_plan


class Attention(nn.Module):
    """Attention whose layers have no telling names."""

    def __init__(self, width: int = 8, heads: int = 4, key_heads: int = 4) -> None:
        super().__init__()
        self.num_heads, self.head_dim = heads, width // heads
        self.first = nn.Linear(width, width)
        self.second = nn.Linear(width, key_heads * self.head_dim)
        self.third = nn.Linear(width, key_heads * self.head_dim)
        self.last = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        one, two, three = (
            layer(x).view(*x.shape[:2], -1, self.head_dim).transpose(1, 2)
            for layer in (self.first, self.second, self.third)
        )
        mixed = nn.functional.scaled_dot_product_attention(one, two, three, enable_gqa=True)
        out: Tensor = self.last(mixed.transpose(1, 2).flatten(2))
        return out


class Gated(nn.Module):
    """A perceptron whose narrowing layer is registered between the widening ones."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.w1, self.w2, self.w3 = nn.Linear(width, 16), nn.Linear(16, width), nn.Linear(width, 16)


class Block(nn.Module):
    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)


def model(*parts: Any) -> nn.Module:
    return nn.ModuleList(Block(*(part() for part in parts)) for _ in range(2))


def test_attention_is_found_by_its_sizes() -> None:
    found = decide(model(Attention), "auto", (), 2)
    styles = {name.rpartition(".")[2]: style for name, style in found.styles.items()}
    assert styles == {"first": "colwise", "second": "colwise", "third": "colwise", "last": "rowwise"}


def test_ranks_share_heads_of_keys_where_they_outnumber_them() -> None:
    found = decide(model(lambda: Attention(key_heads=2)), "auto", (), 4)
    styles = {name.rpartition(".")[2]: style for name, style in found.styles.items()}
    assert styles == {"first": "colwise", "second": "replicate_heads", "third": "replicate_heads", "last": "rowwise"}
    assert set(found.numbers.values()) == {2}
    with pytest.raises(ConfigError, match=r"tp_size=3 does not divide the 4 heads"):
        decide(model(lambda: Attention(width=12, key_heads=2)), "auto", (), 3)


def test_perceptrons_are_found_in_any_order() -> None:
    found = decide(model(Gated), "auto", (), 2)
    styles = {name.rpartition(".")[2]: style for name, style in found.styles.items()}
    assert styles == {"w1": "colwise", "w3": "colwise", "w2": "rowwise"}


class Counted(Attention):
    """Uses the number of heads as a size of a shape."""

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x).view(*x.shape[:2], self.num_heads, -1)  # type: ignore[no-any-return]


class Inherits(Counted):
    """Has its forward from another class."""


class Divided(Attention):
    """Divides the width of its input by the number of heads."""

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x).unflatten(-1, (-1, x.shape[-1] // self.num_heads))  # type: ignore[no-any-return]


class Both(Attention):
    """Does both, so that no value is right for a part of the heads."""

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.size()
        return self.first(x).view(b, t, self.num_heads, c // self.num_heads)  # type: ignore[no-any-return]


class Biased(Attention):
    """Has a bias for each head."""

    def __init__(self) -> None:
        super().__init__()
        self.slopes = nn.Parameter(torch.ones(4))


def test_counts_of_heads_are_divided_where_they_are_shapes() -> None:
    assert [use_of(kind(), "num_heads") for kind in (Attention, Counted, Inherits, Divided, Both)] == [
        "unused",
        "shape",
        "shape",
        "divisor",
        "both",
    ]
    assert decide(model(Counted), "auto", (), 2).attributes == {f"{n}.parts.0": {"num_heads": 2} for n in (0, 1)}
    assert decide(model(Divided), "auto", (), 2).attributes == {}


def test_attention_that_could_not_compute_a_part_of_its_heads_is_left_whole() -> None:
    for kind, why in ((Both, "divides the width of all heads"), (Biased, "Biased.slopes has an entry for each head")):
        found = decide(model(kind, Gated), "auto", (), 2)
        assert all(".parts.1." in name for name in found.styles)
        assert why in found.left["0.parts.0.first"]


class Joined(nn.Module):
    """Attention with one layer for queries, keys and values, in an order that only its code knows."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 4
        self.qkv, self.proj = nn.Linear(8, 24), nn.Linear(8, 8)


def test_nothing_to_split_names_a_plan_for_this_very_model() -> None:
    net = model(Joined)
    with pytest.raises(PrepareError, match=r"concatenates queries, keys and values .* 'colwise_thirds'") as raised:
        decide(net, "auto", (), 2)
    plan = working_plan(net, 2)
    assert plan == {"*.parts.*.qkv": "colwise_gather_output", "*.parts.*.proj": "colwise_gather_output"}
    assert repr(plan) in str(raised.value)
    assert len(decide(net, plan, (), 2).styles) == 4


def test_joined_projections_need_a_whole_share_of_each() -> None:
    assert set(decide(model(Joined), {"*.qkv": "colwise_thirds"}, (), 4).styles.values()) == {"colwise_thirds"}
    with pytest.raises(ConfigError, match=r"3 projections side by side.*one of \[1, 2, 4, 8\]"):
        decide(model(Joined), {"*.qkv": "colwise_thirds"}, (), 3)


def test_a_carried_plan_that_cannot_be_honoured_is_refused() -> None:
    net: Any = model(Gated)
    net.tp_plan = {"*.w1": "some_other_style"}
    with pytest.raises(ConfigError, match=r"uses 'some_other_style' for '0.parts.0.w1', .*tp_plan=\{"):
        decide(net, "auto", (), 2)


def test_a_plan_is_found_below_a_wrapper() -> None:
    inner: Any = model(Gated)
    inner.tp_plan = {"*.w1": "colwise", "*.w2": "rowwise", "*.w3": "colwise"}
    outer = nn.Module()
    outer.backbone = inner
    found = decide(outer, "auto", (), 2)
    assert found.styles["backbone.1.parts.0.w2"] == "rowwise"
    assert "the plan of" in found.source


def test_the_first_pattern_decides() -> None:
    plan = {"0.*.w1": "replicate", "*.w1": "colwise_gather_output", "*.w?": "rowwise_split_input"}
    found = decide(model(Gated), plan, (), 2)
    assert "0.parts.0.w1" not in found.styles
    assert found.styles["1.parts.0.w1"] == "colwise_gather_output"
    assert found.styles["1.parts.0.w2"] == "rowwise_split_input"
