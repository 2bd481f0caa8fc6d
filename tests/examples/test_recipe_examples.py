"""The examples of the recipes at reduced size, as they are: two processes of the warm pool run each as a program."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import pytest

from hasten.runtime.context import ProcessContext
from hasten.testing.pool import ranks
from tests.examples.test_examples import run
from tests.support.hub_server import TOKEN, client_at, serving

PRELOAD: Final = ("transformers.modeling_utils",)


@ranks(2)
def test_muon_ema_evaluates_the_average(ctx: ProcessContext, tmp_path: Path) -> None:
    printed = run("muon_ema.py", "--epochs", 2, "--decay", 0.8, "--out", tmp_path)
    assert (tmp_path / "model.safetensors").exists()
    if ctx.world.rank == 0:
        trained, averaged = map(
            float,
            re.findall(
                r"epoch 2: accuracy ([\d.]+)%, of the average ([\d.]+)%", printed
            )[0],
        )
        assert min(trained, averaged) > 75


@ranks(2)
def test_packing_fills_its_rows(ctx: ProcessContext) -> None:
    pytest.importorskip("transformers")
    printed = run("packing.py", "--megabytes", 0.01, "--max_tokens", 256)
    if ctx.world.rank == 0:
        packed, padded = map(
            float,
            re.findall(r"([\d.]+)% of the\s+places are tokens; .* ([\d.]+)%", printed)[
                0
            ],
        )
        assert packed > 95 > 80 > padded
        first, last = (
            float(re.findall(r"step 0: loss ([\d.]+)", printed)[0]),
            printed.split()[-1],
        )
        assert float(last) < first


@ranks(2)
@pytest.mark.exhaustive
def test_qlora_writes_an_adapter_and_a_merged_model(
    ctx: ProcessContext, tmp_path: Path
) -> None:
    for package in ("transformers", "peft", "bitsandbytes"):
        pytest.importorskip(package)
    printed = run("qlora.py", "--steps", 12, "--megabytes", 0.05, "--out", tmp_path)
    if ctx.world.rank == 0:
        assert (tmp_path / "adapter" / "adapter_model.safetensors").exists()
        assert (tmp_path / "merged" / "model.safetensors").exists()
        losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", printed)]
        assert losses[-1] < losses[0]


@ranks(2)
def test_generate_continues_every_prompt(ctx: ProcessContext) -> None:
    pytest.importorskip("transformers")
    printed = run(
        "generate.py", "--steps", 4, "--every", 2, "--length", 6, "--megabytes", 0.05
    )
    if ctx.world.rank == 0:
        assert (
            printed.count("'def ")
            == printed.count("'import ")
            == printed.count("'class ")
            == 2
        )


@ranks(2)
@pytest.mark.exhaustive
def test_a_resumed_stream_ends_with_the_very_same_weights(
    ctx: ProcessContext, tmp_path: Path
) -> None:
    straight_folder, resumed_folder = tmp_path / "whole", tmp_path / "parts"
    straight = run("stream.py", "--epochs", 2, "--out", straight_folder)
    run("stream.py", "--epochs", 2, "--stop_after", 34, "--out", resumed_folder)
    resumed = run("stream.py", "--epochs", 2, "--out", resumed_folder)
    if ctx.world.rank == 0:
        assert "resumed after step 30" in resumed
        assert resumed.splitlines()[-1] == straight.splitlines()[-1]


@ranks(1)
def test_push_to_hub_loads_the_same_model(ctx: ProcessContext, tmp_path: Path) -> None:
    pytest.importorskip("huggingface_hub")
    with (
        serving() as hub,
        client_at(hub.address, str(tmp_path)),
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("HF_TOKEN", TOKEN)
        printed = run("push_to_hub.py", "--repo", "someone/digits", "--epochs", 2)
    trained, loaded = (
        re.findall(r"epoch 2: accuracy (\S+)%", printed),
        re.findall(r"Hub: accuracy (\S+)%", printed),
    )
    assert trained == loaded != []
