"""FSDP through the drop-in: plugin, flags, variables, checkpoints by hand, and transformers' Trainer, on two processes."""

from __future__ import annotations

import json
import runpy
from functools import partial
from importlib import util
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import nn
from torch.distributed.fsdp import (
    CPUOffload,
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardingStrategy,
)
from torch.distributed.fsdp.wrap import (
    ModuleWrapPolicy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
)

from accelerate._impl.commands.launch_variables import settings_for, variables_for
from accelerate._impl.settings.fsdp_plugin import FullyShardedDataParallelPlugin
from accelerate.commands import config, merge
from accelerate.utils.environment import patch_environment
from accelerate.utils.fsdp_utils import merge_fsdp_weights
from hasten.cli.launch_cmd import make_parser
from hasten.config.files import effective_settings
from hasten.errors import ConfigError
from hasten.launch.job import prepare

TESTS_FOLDER = Path(__file__).parent
FLAGS = (
    *(
        "--cpu",
        "--num_processes",
        "2",
        "--use_fsdp",
        "--fsdp_auto_wrap_policy",
        "TRANSFORMER_BASED_WRAP",
    ),
    *("--fsdp_transformer_layer_cls_to_wrap", "Block"),
)
CLOSE: dict[str, Any] = {"rtol": 0.0, "atol": 1e-5}  # Any: keywords


@pytest.fixture(scope="module")
def loop(tmp_path_factory: pytest.TempPathFactory, warm: Any) -> Path:
    """The folder of one run of scripts/sharded_loop.py, which checks most things itself, in the launcher's environment."""
    folder = tmp_path_factory.mktemp("loop")
    script = str(TESTS_FOLDER / "scripts" / "sharded_loop.py")
    launch_variables = dict(variables_for([*FLAGS, script]))
    with patch_environment(**launch_variables):
        parsed = make_parser().parse_args([*FLAGS, script])
        plan = prepare([script], settings=parsed.settings).plan
    done = warm.run(
        folder, [script, str(folder)], 2, {**launch_variables, **plan.procs[0].env}
    )
    assert not done.failed, done.err[0][-3000:]
    return folder


@pytest.mark.timeout(240)
def test_losses_and_weights_equal_plain_torch_on_one_process(loop: Path) -> None:
    script = runpy.run_path(str(TESTS_FOLDER / "scripts" / "sharded_loop.py"))
    model, optimizer = script["make"]()
    losses = []
    for step in range(4):
        x, y = script["batch"](step)
        loss = (model(x) - y).pow(2).mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    report = json.loads((loop / "found.json").read_text())
    torch.testing.assert_close(
        torch.tensor(report["losses"]), torch.tensor(losses), **CLOSE
    )
    for name, value in model.state_dict().items():
        torch.testing.assert_close(
            torch.tensor(report["weights"][name]), value, **CLOSE
        )
    for source, continued in report["continued"].items():
        torch.testing.assert_close(
            torch.tensor(continued), torch.tensor(losses[2:]), **CLOSE, msg=source
        )
    assert len(report["continued"]) == 8


def test_shards_of_either_format_are_merged(loop: Path, tmp_path: Path) -> None:
    expected = load_file(loop / "sharded" / "exported" / "model.safetensors")
    for number, source in enumerate(
        ["sharded", "sharded/pytorch_model_fsdp_0", "sharded/state", "dcp"]
    ):
        merge_fsdp_weights(str(loop / source), str(tmp_path / str(number)))
        merged = load_file(tmp_path / str(number) / "model.safetensors")
        assert merged.keys() == expected.keys()
        assert all(torch.equal(merged[name], value) for name, value in expected.items())
    weights = {name: torch.zeros_like(value) for name, value in expected.items()}
    # torch alone reads what was saved by hand
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        dcp.load(
            {"model": weights},
            checkpoint_id=loop / "sharded" / "pytorch_model_fsdp_0",
            no_dist=True,
        )
    assert all(torch.equal(weights[name], value) for name, value in expected.items())
    state = torch.load(
        loop / "full" / "state" / "pytorch_model_fsdp.bin", weights_only=True
    )
    assert all(
        torch.allclose(state[name], value, atol=1e-6)
        for name, value in expected.items()
    )
    assert (loop / "full" / "state" / "optimizer.bin").is_file()
    full_state = torch.load(loop / "full" / "pytorch_model_fsdp.bin", weights_only=True)
    assert all(
        torch.allclose(full_state[name], value, atol=1e-6)
        for name, value in expected.items()
    )
    with pytest.raises(ValueError, match="holds no sharded model"):
        merge_fsdp_weights(str(loop / "full"), str(tmp_path / "none"))


def test_commands_refuse_in_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert merge.run([str(tmp_path / "nothing"), str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err.endswith(
        "it is not a folder, so there is no checkpoint to merge.\n"
    )
    assert config.run(["update", "--config_file", str(tmp_path / "nothing.yaml")]) == 2
    assert "accelerate config: The passed config file" in capsys.readouterr().err


@pytest.mark.timeout(240)
def test_trainer_shards_and_resumes_with_the_losses_of_one_process(
    tmp_path: Path, warm: Any
) -> None:
    if util.find_spec("transformers") is None:
        pytest.skip("transformers is not installed (pip install 'hasten[clients]')")
    single: dict[str, Any] = {}
    for processes in (1, 2):
        folder = tmp_path / str(processes)
        folder.mkdir()
        done = warm.run(
            folder,
            [str(TESTS_FOLDER / "scripts" / "sharded_trainer.py"), str(folder)],
            processes,
        )
        assert not done.failed, done.err[0][-3000:]
        histories = json.loads((folder / "found.json").read_text())
        for kind, history in histories.items():
            assert (history.pop("blocks") > 2) == (processes == 2)
            exported = next((folder / kind / "exported").glob("*model.safetensors"))
            history["exported"] = {
                name: value.tolist() for name, value in load_file(exported).items()
            }
        single = single or histories
    _assert_close(histories, single, "trainer")
    assert (
        tmp_path / "2" / "whole" / "checkpoint-2" / "pytorch_model_fsdp.bin"
    ).is_file()
    assert (tmp_path / "2" / "lora" / "checkpoint-2" / "pytorch_model_fsdp_0").is_dir()


def _assert_close(actual: Any, expected: Any, path: str) -> None:
    if isinstance(expected, dict):
        assert actual.keys() == expected.keys(), path
        for key, value in expected.items():
            _assert_close(actual[key], value, f"{path}: {key}")
    elif isinstance(expected, list):
        assert len(actual) == len(expected), path
        for index, value in enumerate(expected):
            _assert_close(actual[index], value, f"{path}[{index}]")
    else:
        assert actual == pytest.approx(expected, rel=0, abs=1e-5), path


def test_a_plugin_takes_what_callers_and_variables_give(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("FSDP_VERSION", raising=False)  # transformers may have set it
    kind = FullyShardedDataParallelPlugin
    plain, new = kind(), kind(fsdp_version=2)
    assert (plain.fsdp_version, plain.sharding_strategy) == (
        1,
        ShardingStrategy.FULL_SHARD,
    )
    assert (plain.reshard_after_forward, new.reshard_after_forward) == (None, True)
    assert (type(plain.cpu_offload), type(new.cpu_offload)) == (
        CPUOffload,
        OffloadPolicy,
    )
    assert [default.state_dict_type.name[:4] for default in (plain, new)] == [
        "FULL",
        "SHAR",
    ]
    filled = kind(
        fsdp_version=2,
        reshard_after_forward="false",
        cpu_offload=True,
        mixed_precision_policy="bf16",
    )
    assert isinstance(filled.cpu_offload, CPUOffloadPolicy)
    assert isinstance(filled.mixed_precision_policy, MixedPrecisionPolicy)
    assert (
        filled.to_hasten().reshard_after_forward,
        filled.to_hasten().cpu_offload,
    ) == (
        False,
        True,
    )
    assert (
        kind(reshard_after_forward="SHARD_GRAD_OP").to_hasten().reshard_after_forward
        is False
    )
    assert (
        kind(mixed_precision_policy="bf16")
        .to_hasten()
        .mixed_precision_policy.param_dtype
        is torch.bfloat16
    )
    assert kind(sharding_strategy="HYBRID_SHARD").to_hasten().hybrid_shard
    assert kind(forward_prefetch=True).to_hasten().forward_prefetch_depth == 1
    assert kind(auto_wrap_policy="NO_WRAP").to_hasten().auto_wrap_policy == "no_wrap"
    words = {
        "FSDP_AUTO_WRAP_POLICY": "SIZE_BASED_WRAP",
        "FSDP_MIN_NUM_PARAMS": "7",
        "FSDP_OFFLOAD_PARAMS": "true",
    }
    with patch_environment(
        **words, FSDP_VERSION="2", FSDP_STATE_DICT_TYPE="FULL_STATE_DICT"
    ):
        from_variables = kind()
    assert from_variables.auto_wrap_policy is size_based_auto_wrap_policy
    taken = from_variables.to_hasten()
    assert (taken.cpu_offload, taken.state_dict_type, taken.min_num_params) == (
        True,
        "FULL_STATE_DICT",
        7,
    )


def test_a_plugin_refuses_what_its_version_has_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("FSDP_VERSION", raising=False)
    kind = FullyShardedDataParallelPlugin
    with pytest.raises(ConfigError, match="NO_SHARD keeps the whole model"):
        kind(sharding_strategy="NO_SHARD").to_hasten()
    wrong: dict[str, dict[str, Any]] = {
        "fsdp_version=3 does not exist": {"fsdp_version": 3},
        "not supported with FSDP1": {"reshard_after_forward": True},
        "not supported with FSDP2": {
            "fsdp_version": 2,
            "sharding_strategy": "FULL_SHARD",
        },
        "FSDP2 does not support LOCAL": {
            "fsdp_version": 2,
            "state_dict_type": "LOCAL_STATE_DICT",
        },
        "forward_prefetch is not yet": {"fsdp_version": 2, "forward_prefetch": True},
        "`torch.distributed.fsdp.CPUOffload` in FSDP1": {
            "cpu_offload": OffloadPolicy()
        },
        "Invalid mixed precision: no": {"mixed_precision_policy": "no"},
        "Invalid auto wrap policy: x": {"auto_wrap_policy": "x"},
        "requires `fsdp_version=2`": {
            "activation_checkpointing": True,
            "activation_checkpointing_offload": True,
        },
    }
    for words, options in wrong.items():
        with pytest.raises(ValueError, match=words):
            kind(**options)
    with pytest.raises(TypeError, match="give a name, or a function"):
        FullyShardedDataParallelPlugin(auto_wrap_policy=3).to_hasten()


def test_policies_of_the_older_version_choose_modules() -> None:
    linear, model = nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3))
    for policy in (
        partial(transformer_auto_wrap_policy, transformer_layer_cls={nn.Linear}),
        partial(size_based_auto_wrap_policy, min_num_params=12),
        ModuleWrapPolicy({nn.Linear}),
    ):
        choose: Any = (
            FullyShardedDataParallelPlugin(auto_wrap_policy=policy)
            .to_hasten()
            .auto_wrap_policy
        )
        assert choose(linear) and not choose(nn.ReLU())
    by_name = FullyShardedDataParallelPlugin(
        auto_wrap_policy=transformer_auto_wrap_policy
    ).to_hasten()
    assert by_name.auto_wrap_policy == "transformer_based_wrap"
    with pytest.raises(
        ValueError, match="Could not find the transformer layer class Block"
    ):
        FullyShardedDataParallelPlugin(
            auto_wrap_policy="TRANSFORMER_BASED_WRAP",
            transformer_cls_names_to_wrap=["Block"],
        ).set_auto_wrap_policy(model)


def test_flags_become_the_variables_that_libraries_read() -> None:
    variables = variables_for(
        [*FLAGS, "--mixed_precision", "bf16", "--fsdp_offload_params", "true", "x.py"]
    )
    assert (
        variables["ACCELERATE_USE_FSDP"] == variables["FSDP_OFFLOAD_PARAMS"] == "true"
    )
    assert (
        variables["FSDP_TRANSFORMER_CLS_TO_WRAP"],
        variables["ACCELERATE_MIXED_PRECISION"],
    ) == ("Block", "bf16")
    plain = variables_for(["--use_fsdp", "--num_processes=2", "x.py"])
    default_variables = {
        "FSDP_OFFLOAD_PARAMS": "false",
        "FSDP_RESHARD_AFTER_FORWARD": "true",
        "FSDP_VERSION": "2",
    }
    # defaults are said, too
    assert {
        **plain,
        **default_variables,
        "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT",
    } == plain
    assert not any(name.startswith("FSDP") for name in variables_for(["--cpu", "x.py"]))


def test_variables_of_a_launch_are_read_as_the_settings_they_stand_for() -> None:
    """Whatever hasten reads of a section's variables, a launch writes: none is forgotten between the two."""
    fsdp = [
        "--use_fsdp",
        "--fsdp_min_num_params=12",
        "--fsdp_sync_module_states=false",
        "--fsdp_reshard_after_forward=4",
    ]
    nvme = [
        "--use_deepspeed",
        "--zero_stage=3",
        "--offload_param_device=nvme",
        "--offload_param_nvme_path=/x",
        "--debug",
    ]
    for words in (
        [*fsdp, "--fsdp_auto_wrap_policy=SIZE_BASED_WRAP", "x.py"],
        [*nvme, "--zero3_save_16bit_model=true", "x.py"],
    ):
        launch_settings = settings_for(words)
        assert (
            effective_settings(variables_for(words), None, ()).config == launch_settings
        )
