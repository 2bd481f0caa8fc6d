"""The replacement of scaled_dot_product_attention ends with its block, in every module."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from hasten.strategies.context.sdpa import AttentionPatch


def test_a_module_first_imported_inside_the_block_gets_the_original_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "late_attention.py").write_text(
        "from torch.nn.functional import scaled_dot_product_attention as attend\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    original = F.scaled_dot_product_attention

    def stand_in(*tensors: Tensor) -> Tensor:
        return torch.zeros(())

    patch = AttentionPatch()
    try:
        with patch.replace_attention(stand_in):
            late_module = importlib.import_module("late_attention")
            assert late_module.attend is stand_in
        assert late_module.attend is original
        assert F.scaled_dot_product_attention is original
        with patch.replace_attention(stand_in):
            assert late_module.attend is stand_in
        assert late_module.attend is original
    finally:
        sys.modules.pop("late_attention", None)
