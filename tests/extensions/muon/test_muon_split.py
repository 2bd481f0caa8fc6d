"""Muon on whole matrices, and the split of a model's parameters between Muon and AdamW."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from hasten.errors import ConfigError
from hasten.extensions.muon.muon import Muon
from hasten.extensions.muon.optimizers import optimizers, split_parameters


def trained(cls: Any, steps: int = 20, **options: Any) -> torch.Tensor:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(12, 24, bias=False), nn.Tanh(), nn.Linear(24, 8, bias=False)
    )
    optimizer = cls(net.parameters(), lr=0.02, **options)
    x, y = torch.randn(16, 12), torch.randn(16, 8)
    for _ in range(steps):
        optimizer.zero_grad()
        torch.autograd.backward((net(x) - y).pow(2).mean())
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in net.parameters()])


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"nesterov": False},
        {"adjust_lr_fn": "match_rms_adamw"},
        {"weight_decay": 0.0, "momentum": 0.8},
        {"ns_steps": 3},
    ],
)
def test_whole_matrices_train_bitwise_as_with_torch(options: dict[str, Any]) -> None:
    expected = trained(torch.optim.Muon, **options)
    assert torch.equal(
        trained(Muon, iteration_dtype=torch.bfloat16, **options), expected
    )
    # float32 iterations on the CPU
    assert not torch.equal(trained(Muon, **options), expected)


def test_a_stack_is_updated_matrix_by_matrix() -> None:
    torch.manual_seed(0)
    stack = nn.Parameter(torch.randn(3, 4, 6))
    matrices = [nn.Parameter(matrix.clone()) for matrix in stack.detach()]
    gradient = torch.randn(3, 4, 6)
    stack.grad = gradient
    for parameter, matrix_gradient in zip(matrices, gradient, strict=True):
        parameter.grad = matrix_gradient.clone()
    Muon([stack], lr=0.1).step()
    Muon(matrices, lr=0.1).step()
    torch.testing.assert_close(
        stack.detach(), torch.stack([p.detach() for p in matrices])
    )


class Model(nn.Module):
    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 8)
        self.pos_embed = nn.Parameter(torch.zeros(16, 8))
        self.block = nn.TransformerEncoderLayer(8, 2, 16)
        self.experts = nn.Parameter(torch.zeros(4, 8, 8))
        self.conv = nn.Conv1d(8, 8, 3)
        self.norm = nn.LayerNorm(8)
        self.lm_head = nn.Linear(8, 50, bias=False)
        if tied:
            self.lm_head.weight = self.embed.weight


@pytest.mark.parametrize("tied", [False, True])
def test_parameters_are_split_by_role(tied: bool) -> None:
    split = split_parameters(Model(tied))
    assert set(split.muon) == {
        "block.self_attn.in_proj_weight",
        "block.self_attn.out_proj.weight",
        "block.linear1.weight",
        "block.linear2.weight",
        "experts",
    }
    assert split.reasons["embed.weight"] == "embedding"
    assert split.reasons["pos_embed"] == "embedding"
    assert split.reasons["conv.weight"] == "convolution"
    assert split.reasons["block.linear1.bias"] == "vector or scalar"
    if not tied:
        assert split.reasons["lm_head.weight"] == "output head"
    everything = {name for name, _ in Model(tied).named_parameters()}
    assert set(split.muon) | set(split.adamw) == everything
    assert not set(split.muon) & set(split.adamw)


def test_the_last_matrix_is_the_head_where_no_name_says_so() -> None:
    net = nn.Sequential(
        nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)
    )
    assert set(split_parameters(net).muon) == {"0.weight", "2.weight"}


def test_frozen_parameters_are_left_out_and_patterns_go_to_adamw(
    capsys: pytest.CaptureFixture[str],
) -> None:
    net = nn.Sequential(
        nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 2)
    )
    net[1].requires_grad_(False)
    muon, adamw = optimizers(net, lr=0.1, adamw_lr=0.01, adamw=[r"^2\."])
    assert [len(group["params"]) for group in muon.param_groups] == [1]
    assert muon.param_groups[0]["lr"] == 0.1
    assert adamw.param_groups[0]["lr"] == 0.01
    assert [group["weight_decay"] for group in adamw.param_groups] == [0.1, 0.0]
    shown = capsys.readouterr().err
    assert "Muon      1 tensors             32 values  hidden matrix: 0.weight" in shown
    assert "output head: 3.weight" in shown


def test_wrong_use_is_refused_with_the_way_out() -> None:
    net = nn.Linear(4, 4)
    with pytest.raises(ConfigError, match=r"shape \(4,\).*hasten.optimizers"):
        Muon(net.parameters())
    with pytest.raises(ConfigError, match="'nothing' matches no trainable parameter"):
        optimizers(net, adamw=["nothing"], show=False)
    with pytest.raises(ConfigError, match="'lion'"):
        optimizers(net, kind="lion", show=False)  # type: ignore[arg-type]  # a wrong value on purpose
    with pytest.raises(ConfigError, match="no trainable parameters"):
        optimizers(nn.Linear(4, 4).requires_grad_(False), show=False)
    for wrong in (
        {"lr": -1.0},
        {"momentum": 1.0},
        {"ns_steps": 0},
        {"adjust_lr_fn": "other"},
        {"weight_decay": float("nan")},
    ):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            Muon([nn.Parameter(torch.zeros(2, 2))], **wrong)
