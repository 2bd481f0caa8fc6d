"""Repeated blocks are found wherever their list is: inside a model, in a list of lists, or as the model itself."""

from __future__ import annotations

from torch import nn

from hasten.strategies.blocks import repeated_blocks
from hasten.testing.toys import Block


def names(model: nn.Module) -> list[str]:
    return [name for name, _ in repeated_blocks(model)]


def test_blocks_are_found_wherever_their_list_is() -> None:
    blocks = [Block(4, 2) for _ in range(3)]
    assert names(nn.Sequential(*blocks)) == ["0", "1", "2"]
    assert names(nn.Sequential(nn.Embedding(3, 4), *blocks, nn.Linear(4, 3))) == [
        "1",
        "2",
        "3",
    ]
    assert names(nn.Sequential(nn.Sequential(*blocks), nn.LayerNorm(4))) == [
        "0.0",
        "0.1",
        "0.2",
    ]
    assert names(nn.ModuleList(blocks)) == ["0", "1", "2"]
    assert names(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))) == []
    assert names(blocks[0]) == []
