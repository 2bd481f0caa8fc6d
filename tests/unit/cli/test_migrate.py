"""`hasten migrate`: names change, everything else stays, and what behaves differently is named."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from hasten.cli import migrate_cmd
from hasten.cli.main import main
from hasten.cli.migrating import NOTES, migrate
from hasten.config.legacy import OLD_NAMES
from hasten.config.sharding import FullyShardedDataParallelPlugin

SCRIPT = """# héader: a comment with accelerate in it
from accelerate import Accelerator, DataLoaderConfiguration  # two names
from accelerate.utils import (
    set_seed,  # the seed
)
import accelerate

accelerate.utils.set_seed(1)
text = "ünïcode", accelerate.skip_first_batches
accelerator = Accelerator(cpu = True)   # odd spacing stays
"""


def test_only_names_change() -> None:
    done = migrate(SCRIPT)
    assert done.text == SCRIPT.replace("from accelerate.utils import", "from hasten import").replace(
        "from accelerate import", "from hasten import"
    ).replace("import accelerate\n", "import hasten\n").replace(
        "accelerate.utils.set_seed(1)", "hasten.set_seed(1)"
    ).replace("accelerate.skip_first_batches", "hasten.skip_first_batches")
    assert done.findings == ()


def test_a_script_without_accelerate_is_left_alone() -> None:
    text = "import torch\naccelerate = 3\nprint(accelerate)\n"
    assert migrate(text).text == text


def test_names_that_hasten_lacks_stay_and_are_said() -> None:
    done = migrate("from accelerate.state import (\n    PartialState,  # kept\n    set_seed as seed,\n)\n")
    assert done.text == "# kept\nfrom hasten import set_seed as seed\nfrom accelerate.state import PartialState\n"
    ast.parse(done.text)
    assert [(one.line, "PartialState" in one.text) for one in done.findings] == [(1, True)]


@pytest.mark.parametrize("method", sorted(NOTES))
def test_every_method_that_differs_is_named(method: str) -> None:
    done = migrate(f"from accelerate import Accelerator\na = Accelerator()\na.{method}()\n")
    assert any(one.line == 3 and method in one.text for one in done.findings)


def test_arguments_and_attributes_that_hasten_lacks_are_named() -> None:
    done = migrate(
        "from accelerate import Accelerator\n"
        "from accelerate.utils import ProjectConfiguration\n"
        "accelerator = Accelerator(project_config=ProjectConfiguration(surprise=True))\n"
        "accelerator.state.num_processes\n"
        "accelerator.prepare(model, lr_scheduler)\n"
        "accelerator.reduce(loss, scale=2.0)\n"
    )
    said = {one.line: one.text for one in done.findings}
    assert "surprise" in said[3]
    assert "no state" in said[4]
    assert "once per update" in said[5]
    assert "scale" in said[6]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("Accelerator().prepare(optimizer)", "refuses an optimizer before its model"),
        ("accelerator.prepare(optimizer)\nmodel = accelerator.prepare(model)", "refuses an optimizer before its model"),
        ("Accelerator().prepare(StepLR(optimizer, 4))", "a scheduler before its optimizer"),
        ("model = accelerator.prepare(model)\noptimizer = accelerator.prepare(optimizer)", None),
        ("model, optimizer = accelerator.prepare(model, optimizer)", None),
        ("config.dp_dim_names", "holds the sizes alone"),
        ("asdict(config)", "other defaults"),
        ("loader.state_dict()['_num_yielded']", "keys are hasten's own"),
        ("isinstance(loader, StatefulDataLoader)", "no StatefulDataLoader"),
        ("print(type(loader).__name__)", "other classes"),
    ],
)
def test_habits_that_hasten_does_not_share_are_named(text: str, said: str | None) -> None:
    done = migrate(f"from accelerate import Accelerator\naccelerator = Accelerator()\n{text}\n")
    found = [one.text for one in done.findings if "settings of its own" not in one.text]
    assert any(said in one for one in found) if said is not None else found == []


def test_the_command_prints_a_diff_and_writes_when_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train.py"
    script.write_bytes(b"from accelerate import Accelerator\r\nprint(Accelerator)\r\n")
    assert main(["migrate", str(tmp_path)]) == 0
    assert "+from hasten import Accelerator" in capsys.readouterr().out
    assert b"accelerate" in script.read_bytes()
    assert main(["migrate", str(script), "--write"]) == 0
    assert script.read_bytes() == b"from hasten import Accelerator\r\nprint(Accelerator)\r\n"


def test_findings_make_the_exit_code_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train.py"
    script.write_text("from accelerate import PartialState\n")
    assert migrate_cmd.main([str(script)]) == 1
    assert f"{script}:1: accelerate.PartialState" in capsys.readouterr().err


@pytest.mark.parametrize(("text", "said"), [("accelerate = (\n", "is not valid Python"), (None, "does not exist")])
def test_what_cannot_be_migrated_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | None, said: str
) -> None:
    script = tmp_path / "train.py"
    if text is not None:
        script.write_text(text)
    assert main(["migrate", str(script)]) == 2
    assert said in capsys.readouterr().err


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
        ("Accelerator(downcast_bf16=True)", "xla=dict(downcast_bf16=...)"),
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
