"""A Llama-like model of 70 billion parameters on 512 GPUs is planned in minutes, with little memory."""

from __future__ import annotations

import re
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest

MODEL = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM


def llama():
    config = LlamaConfig(
        hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64, num_key_value_heads=8,
        vocab_size=128256, tie_word_embeddings=False, use_cache=False,
    )
    with torch.device("meta"):
        return LlamaForCausalLM(config)
"""


@pytest.mark.exhaustive
@pytest.mark.timed
@pytest.mark.timeout(240)
def test_seventy_billion_parameters_are_planned_within_two_minutes_and_8_gb(
    tmp_path: Path,
) -> None:
    (tmp_path / "big.py").write_text(MODEL)
    words = [
        "plan",
        "big:llama",
        "--gpus",
        "512",
        "--gpu",
        "h200",
        "--global-batch",
        "4096",
        "--seq",
        "4096",
        "-o",
        "config.yaml",
    ]
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "hasten.cli.main", *words],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    seconds = time.perf_counter() - start
    assert done.returncode == 0, done.stderr
    shown = re.search(r"([\d,]+) parameters", done.stdout)
    assert shown is not None
    num_parameters = int(shown[1].replace(",", ""))
    assert num_parameters == pytest.approx(70e9, rel=0.02)
    assert "strategy: fsdp" in (tmp_path / "config.yaml").read_text()
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024 < 8e9
    assert seconds < 120, f"{seconds:.0f} s"
