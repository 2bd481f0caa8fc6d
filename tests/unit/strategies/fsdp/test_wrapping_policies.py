"""Which modules get a shard group of their own: policies and ties."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from hasten.config.sections.parallel import FullyShardedDataParallelPlugin
from hasten.errors import ConfigError
from hasten.strategies.fsdp.shard_groups import (
    blocks_to_shard,
    keep_ties_together,
    owned_parameters,
)
from hasten.testing.toys import Block, TinyLM


def names_of(model: nn.Module, blocks: list[nn.Module]) -> list[str]:
    names_by_id = {id(module): name for name, module in model.named_modules()}
    return [names_by_id[id(block)] for block in blocks]


def test_policies_choose_modules_innermost_first() -> None:
    model = TinyLM(width=8)

    def block_names(**settings: Any) -> list[str]:
        return names_of(
            model, blocks_to_shard(model, FullyShardedDataParallelPlugin(**settings))
        )

    assert block_names() == ["blocks.0", "blocks.1"]
    assert block_names(auto_wrap_policy="no_wrap") == []
    assert block_names(transformer_cls_names_to_wrap=("Block", "LayerNorm")) == [
        *(f"blocks.{i}.norm{j}" for i in (0, 1) for j in (1, 2)),
        "blocks.0",
        "blocks.1",
        "norm",
    ]
    assert block_names(auto_wrap_policy="size_based_wrap", min_num_params=600) == [
        "blocks.0",
        "blocks.1",
    ]
    assert block_names(auto_wrap_policy="size_based_wrap", min_num_params=10**9) == []
    assert block_names(
        auto_wrap_policy=lambda module: isinstance(module, nn.Embedding)
    ) == [
        "embed",
        "position",
    ]


def test_policies_of_fsdp1_are_refused() -> None:
    plugin = FullyShardedDataParallelPlugin(auto_wrap_policy=ModuleWrapPolicy({Block}))
    with pytest.raises(
        ConfigError, match=r"policy of FSDP1.*transformer_cls_names_to_wrap"
    ):
        blocks_to_shard(TinyLM(width=8), plugin)


def test_every_parameter_has_one_owner() -> None:
    model = TinyLM(width=8, depth=3, tied=True)
    blocks: list[nn.Module] = [model.blocks[1]]
    owners = {name: owner for owner, name, _ in owned_parameters(model, blocks)}
    assert owners["blocks.1.q.weight"] is model.blocks[1]
    assert {
        id(owner) for name, owner in owners.items() if not name.startswith("blocks.1.")
    } == {id(model)}


def test_blocks_that_share_a_parameter_join_the_group_around_them() -> None:
    outer = nn.ModuleDict(
        {"a": nn.Sequential(Block(4, 1), Block(4, 1)), "b": nn.Sequential(Block(4, 1))}
    )
    weight = outer.get_parameter("a.0.q.weight")
    outer.get_submodule("b.0.q").weight = weight
    inner = [outer.get_submodule(name) for name in ("a.0", "a.1", "b.0")]
    separate_blocks, tied = keep_ties_together(
        outer, [*inner, outer["a"], outer["b"]], set()
    )
    assert names_of(outer, separate_blocks) == [
        "a.1"
    ]  # the tie reaches through both levels
    assert len(tied) == 1
    assert keep_ties_together(outer, inner[1:2], set()) == (inner[1:2], [])
    assert keep_ties_together(outer, inner, {weight}) == (inner, [])
    shared = Block(4, 1)
    sharing = nn.ModuleDict({"a": nn.Sequential(shared), "b": nn.Sequential(shared)})
    # one module in two places is one group
    assert keep_ties_together(sharing, [shared], set()) == ([shared], [])
    assert keep_ties_together(sharing, [sharing["a"], sharing["b"]], set())[0] == []
