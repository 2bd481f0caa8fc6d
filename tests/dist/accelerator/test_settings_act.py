"""Settings that were once accepted and ignored: each acts on real ranks, or is refused in words."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from hasten import (
    Accelerator,
    DeepSpeedSequenceParallelConfig,
    GradientAccumulationPlugin,
    ParallelismConfig,
    ProjectConfiguration,
    TorchTensorParallelConfig,
    TrackingConfig,
)
from hasten.cli.main import main
from hasten.errors import ConfigError, MissingPackageError
from hasten.optional import available
from hasten.runtime.context import ProcessContext
from hasten.testing.pool import ranks
from hasten.tracking.registry import installed_trackers, tracker_names


def draws() -> list[float]:
    return [random.random(), float(np.random.rand()), float(torch.rand(()))]


@ranks(2, 3)
def test_rng_types_make_generators_equal_at_each_epoch(ctx: ProcessContext) -> None:
    generator = torch.Generator()
    accelerator = Accelerator(context=ctx, rng_types=("python", "torch", "generator"))
    loader = accelerator.prepare(
        DataLoader(
            TensorDataset(torch.arange(12)),
            batch_size=2,
            shuffle=True,
            generator=generator,
        )
    )
    for epoch in range(2):
        random.seed(ctx.rank + epoch)
        np.random.seed(ctx.rank + epoch)
        torch.manual_seed(ctx.rank + epoch)
        next(iter(loader))
        everyone = ctx.world.all_gather_object(draws())
        assert len({rank_draws[0] for rank_draws in everyone}) == 1
        # numpy was not asked for
        assert len({rank_draws[1] for rank_draws in everyone}) == ctx.world.size
        assert len({rank_draws[2] for rank_draws in everyone}) == 1


@ranks(1, 2)
def test_what_cannot_be_honoured_is_refused_in_the_constructor(
    ctx: ProcessContext,
) -> None:
    cases: tuple[tuple[dict[str, Any], str], ...] = (  # Any: settings of every type
        (
            {"rng_types": ("cuda", "nonsense")},
            "rng type '(cuda|nonsense)' is not known",
        ),
        (
            {
                "parallelism_config": ParallelismConfig(
                    sp_handler=DeepSpeedSequenceParallelConfig(sp_seq_length=8)
                )
            },
            "sp_seq_length=8 .* sequence parallelism is not in this version",
        ),
        (
            {
                "parallelism_config": ParallelismConfig(
                    tp_handler=TorchTensorParallelConfig(enable_async_tp=True)
                )
            },
            "enable_async_tp=true .* is not in this version",
        ),
        (
            {
                "gradient_accumulation_plugin": GradientAccumulationPlugin(
                    adjust_scheduler=False
                )
            },
            "adjust_scheduler=false",
        ),
        (
            {"xla": {"downcast_bf16": True}},
            "downcast_bf16=true .* is not in this version; set mixed_precision: bf16",
        ),
    )
    for settings, words in cases:
        with pytest.raises(ConfigError, match=words):
            Accelerator(context=ctx, **settings)


@ranks(1, 2)
def test_automatic_naming_acts(ctx: ProcessContext, tmp_path: Path) -> None:
    def made(**options: Any) -> Accelerator:  # Any: options of the project
        return Accelerator(
            context=ctx,
            project_config=ProjectConfiguration(project_dir=str(tmp_path), **options),
        )

    assert made().save_state().endswith("checkpoint_0")
    assert made(automatic_checkpoint_naming=True).save_state().endswith("checkpoint_1")
    with pytest.raises(ConfigError, match="names a folder"):
        made(automatic_checkpoint_naming=True).save_state(f"{tmp_path}/x")
    with pytest.raises(ConfigError, match="no place for the checkpoint"):
        made(automatic_checkpoint_naming=False).save_state()
    assert (
        made(automatic_checkpoint_naming=False)
        .save_state(f"{tmp_path}/x")
        .endswith("x")
    )


@ranks(1)
def test_a_tracker_whose_package_is_missing_is_an_error_or_a_warning(
    ctx: ProcessContext,
) -> None:
    gone = next(
        (name for name in tracker_names() if name not in installed_trackers()), None
    )
    if gone is None:
        pytest.skip("the packages of all trackers are installed")
    with pytest.raises(
        MissingPackageError,
        match=f"log_with='{gone}'.*pip install .*, or set missing_tracker: warn",
    ):
        Accelerator(context=ctx, log_with=gone)
    with pytest.warns(UserWarning, match="not logged there"):
        accelerator = Accelerator(
            context=ctx,
            log_with=[gone, "jsonl"],
            tracking=TrackingConfig(missing_tracker="warn"),
        )
    assert accelerator._tracking.names == ("jsonl",)
    assert gone not in Accelerator(context=ctx, log_with="all")._tracking.names


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (
            ["--num_processes=2", "--tee=9:3"],
            "tee='9:3' names local rank 9, but this machine starts 2",
        ),
        (["--num_processes=2", "--tee=0:9"], "tee='0:9' is neither"),
        (["--tee=1:3"], "names local rank 1, but this machine starts 1"),
        (["--rdzv_conf=x"], "'x' is not key=value"),
        (["--rdzv_conf=a=1"], "the static rendezvous does not support"),
        (["--rdzv_endpoint=nonsense"], "is not host:port"),
        (
            ["--strategy=megatron", "--num_processes=2"],
            "the package 'megatron' is not installed",
        ),
        (["--strategy=xla"], "the package 'torch_xla' is not installed"),
        (["--tpu"], "the package 'torch_xla' is not installed"),
    ],
)
def test_the_launcher_refuses_in_one_sentence_with_code_2(
    flags: list[str],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    for package in ("megatron", "torch_xla"):
        if f"the package {package!r} is not installed" in words and available(package):
            pytest.skip(f"{package} is installed")
    monkeypatch.setenv("HASTEN_HOME", str(tmp_path))
    (tmp_path / "script.py").write_text("print('ran')")
    cpu = [] if "--tpu" in flags else ["--cpu"]
    code = main(["launch", *cpu, *flags, str(tmp_path / "script.py")])
    captured = capfd.readouterr()
    assert code == 2, captured.err
    assert words in captured.err
    assert captured.err.count("\n") == 1
    assert "ran" not in captured.out
