"""`hasten migrate` names the replacement of each argument that hasten lacks, and refuses what it cannot read."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hasten.cli.main import main
from hasten.config.legacy import OLD_NAMES
from hasten.config.sections.parallel import FullyShardedDataParallelPlugin
from hasten.tools.migrate.migrating import migrate


@pytest.mark.parametrize(
    ("call", "advice"),
    [
        ('FullyShardedDataParallelPlugin(sharding_strategy="FULL_SHARD")', "write reshard_after_forward=True"),
        ("FullyShardedDataParallelPlugin(sharding_strategy=ShardingStrategy.HYBRID_SHARD_ZERO2)", "reshard_after_forward=False, hybrid_shard=True"),
        ('FullyShardedDataParallelPlugin(sharding_strategy="NO_SHARD")', "set strategy: ddp"),
        ("FullyShardedDataParallelPlugin(sharding_strategy=args.strategy)", "hasten.fsdp_from_fsdp1({'sharding_strategy': ...})"),
        ("FullyShardedDataParallelPlugin(forward_prefetch=True)", "write forward_prefetch_depth=1"),
        ('FullyShardedDataParallelPlugin(backward_prefetch="BACKWARD_PRE")', "FSDP2 always gathers the next block"),
        ("FullyShardedDataParallelPlugin(use_orig_params=True)", "remove it"),
        ("FullyShardedDataParallelPlugin(fsdp_version=1)", "FSDP1 is no longer used"),
        ("FullyShardedDataParallelPlugin(state_dict_config=x)", "remove it"),
        ("FullyShardedDataParallelPlugin(cpu_ofload=True)", "did you mean cpu_offload?"),
        ("DeepSpeedPlugin(enable_msamp=True)", "MS-AMP is no longer maintained"),
        ('DeepSpeedPlugin(deepspeed_config_file="x")', "write hf_ds_config="),
        ("Accelerator(dispatch_batches=True)", "dataloader_config=DataLoaderConfiguration(dispatch_batches=...)"),
        ("Accelerator(downcast_bf16=True)", "xla=XLAConfig(downcast_bf16=...)"),
        ("Accelerator(fp16=True)", 'mixed_precision="fp16"'),
    ],
)  # fmt: skip
def test_an_argument_that_hasten_lacks_is_named_with_its_replacement(call: str, advice: str) -> None:
    done = migrate(f"from accelerate import {call.partition('(')[0]}\n{call}\n")
    assert [(one.line, advice in one.text) for one in done.findings] == [(2, True)], done.findings


def test_migrate_knows_every_option_that_settings_files_translate() -> None:
    """Each old name of FSDP has advice, and what the advice writes is an argument of the plugin."""
    for name in OLD_NAMES:
        done = migrate(f'from accelerate import FullyShardedDataParallelPlugin as P\nP({name}="1")\n')
        (one,) = (found.text for found in done.findings)
        for written in re.findall(r"write (\w+)=", one):
            assert written in FullyShardedDataParallelPlugin.__dataclass_fields__, one
        assert re.search("write|remove it", one), one


def test_established_arguments_of_the_accelerator_need_no_advice() -> None:
    call = (
        "Accelerator(cpu=True, split_batches=True, fsdp_plugin=p, dataloader_config=d, rng_types=r, kwargs_handlers=[])"
    )
    assert migrate(f"from accelerate import Accelerator\n{call}\n").findings == ()


def test_a_script_that_is_no_text_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "latin.py"
    script.write_bytes(b"from accelerate import Accelerator  # caf\xe9\n")
    assert main(["migrate", str(script)]) == 2
    said = capsys.readouterr().err
    assert "latin.py" in said
    assert "UTF-8" in said


def test_a_notebook_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    notebook = tmp_path / "mine.ipynb"
    notebook.write_text('{"cells": [{"source": ["from accelerate import Accelerator"]}]}')
    assert main(["migrate", str(notebook)]) == 2
    assert "nbconvert" in capsys.readouterr().err
