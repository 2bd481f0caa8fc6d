"""Launch helpers, settings files and parsers: variables, records and messages of the original, and replaced names that act."""

from __future__ import annotations

import json
import logging
from argparse import Namespace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import yaml

import accelerate.commands.launch as launching
import accelerate.utils.launch
from accelerate.commands.accelerate_cli import main
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.config.default import write_basic_config
from accelerate.commands.estimate import estimate_command_parser
from accelerate.commands.launch import launch_command_parser
from accelerate.commands.to_fsdp2 import convert_config_to_fsdp2
from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env, prepare_simple_launcher_cmd_env

# Any in this file: namespaces of argparse.
SETTINGS = {"compute_environment": "LOCAL_MACHINE", "distributed_type": "NO", "num_processes": 1, "use_cpu": True}


def parsed(*words: str) -> Any:
    validate = getattr(launching, "_validate_launch_command")  # noqa: B009  type checkers do not see what faces take from elsewhere
    made = validate(launch_command_parser().parse_args([*words, "train.py"]))[0]
    assert isinstance(made, Namespace)
    return made


def test_workers_under_fsdp_find_every_variable() -> None:
    flags = "--use_fsdp --num_processes 2 --fsdp_offload_params True --fsdp_transformer_layer_cls_to_wrap Block"
    with mock.patch("accelerate.utils.launch.is_port_in_use", return_value=False):
        env = prepare_multi_gpu_env(parsed(*flags.split()))
    found = {name: value for name, value in env.items() if name.startswith("FSDP_")}
    assert found == {
        "FSDP_VERSION": "1",
        "FSDP_SHARDING_STRATEGY": "FULL_SHARD",
        "FSDP_RESHARD_AFTER_FORWARD": "true",
        "FSDP_OFFLOAD_PARAMS": "true",
        "FSDP_MIN_NUM_PARAMS": "100000000",
        "FSDP_TRANSFORMER_CLS_TO_WRAP": "Block",
        "FSDP_FORWARD_PREFETCH": "false",
        "FSDP_USE_ORIG_PARAMS": "true",
        "FSDP_CPU_RAM_EFFICIENT_LOADING": "true",
        "FSDP_SYNC_MODULE_STATES": "true",
        "FSDP_ACTIVATION_CHECKPOINTING": "false",
        "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD": "false",
    }


def test_other_kinds_of_launch_set_their_variables() -> None:
    args = parsed("--use_deepspeed", "--num_processes", "2", "--zero_stage", "3", "--zero3_init_flag", "True")
    with mock.patch("accelerate.utils.launch.is_port_in_use", return_value=False):
        command, env = prepare_deepspeed_cmd_env(args)
        megatron = prepare_multi_gpu_env(parsed("--use_megatron_lm", "--num_processes", "2"))
    assert command is None and args.nproc_per_node == "2" and args.master_port == "29500"
    assert (env["ACCELERATE_DEEPSPEED_ZERO_STAGE"], env["ACCELERATE_DEEPSPEED_ZERO3_INIT"]) == ("3", "true")
    assert "ACCELERATE_GRADIENT_CLIPPING" not in env
    assert (megatron["MEGATRON_LM_TP_DEGREE"], megatron["MEGATRON_LM_GRADIENT_CLIPPING"]) == ("1", "1.0")
    _, alone = prepare_simple_launcher_cmd_env(parsed("--cpu", "--num_cpu_threads_per_process", "3"))
    assert (alone["ACCELERATE_USE_CPU"], alone["OMP_NUM_THREADS"], alone["KMP_BLOCKTIME"]) == ("True", "3", "1")


def test_a_taken_port_is_told_and_a_second_machine_is_refused() -> None:
    with mock.patch("accelerate.utils.launch.is_port_in_use", return_value=True):
        args = parsed("--multi_gpu", "--num_processes", "2")
        with pytest.warns(UserWarning, match="standalone-like mode"):
            prepare_multi_gpu_env(args)
        assert args.standalone is True
        there = ["--num_machines", "2", "--machine_rank", "0", "--main_process_ip", "1.2.3.4"]
        with pytest.raises(ConnectionError, match="another process is utilizing it"):
            prepare_multi_gpu_env(parsed("--multi_gpu", "--num_processes", "4", *there))


def test_a_replaced_name_acts_and_comes_back() -> None:
    before = accelerate.utils.launch.which
    words = ["--cpu", "--num_processes", "4", "--mpirun_hostfile", "hosts"]
    with (
        mock.patch("accelerate.utils.launch.which", side_effect=lambda name: name == "mpirun"),
        mock.patch("accelerate.utils.launch.subprocess.check_output", return_value=b"Open MPI 4"),
    ):
        command, _ = prepare_simple_launcher_cmd_env(parsed(*words))
    assert command[:7] == ["mpirun", "--hostfile", "hosts", "--npernode", "4", "-n", "4"]
    assert accelerate.utils.launch.which is before
    with pytest.raises(OSError, match="mpirun or mpiexec were not found"):
        prepare_simple_launcher_cmd_env(parsed(*words))


def test_defaults_that_were_used_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "accelerate.commands.launch"):
        parsed("--cpu", "--num_processes", "1", "--mixed_precision", "bf16")
    assert "`--num_machines` was set to a value of `1`" in caplog.text and "mixed_precision" not in caplog.text


def test_unknown_keys_are_named_in_the_words_of_the_original(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text(yaml.safe_dump({**SETTINGS, "invalid": 1, "another": 2}))
    monkeypatch.setattr("sys.argv", ["accelerate", "launch", "--config_file", str(file), "train.py"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert f"The config file at {file} had unknown keys (['another', 'invalid'])" in capsys.readouterr().err


def test_what_fsdp2_lacks_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    made = convert_config_to_fsdp2({"fsdp_config": {"fsdp_version": 1, "fsdp_use_orig_params": True}})
    assert made == {"fsdp_config": {"fsdp_version": 2}}
    assert convert_config_to_fsdp2(made) is made and convert_config_to_fsdp2({"num_processes": 1}) == {
        "num_processes": 1
    }
    assert [record.getMessage() for record in caplog.records][:2] == [
        "Argument fsdp_use_orig_params has been removed in FSDP2, skipping this key...",
        "Config already specifies FSDP2, skipping conversion...",
    ]


def test_a_file_for_this_machine_is_json_and_yaml(tmp_path: Path) -> None:
    file = write_basic_config(save_location=str(tmp_path / "default.yaml"))
    assert file and json.loads(file.read_text()) == load_config_from_file(str(file)).to_dict()


def test_namespaces_name_what_was_given() -> None:
    args = estimate_command_parser().parse_args(["bert", "--dtypes", "int8"])
    assert args.nondefault == {"model_name", "dtypes"} and not hasattr(args, "func")
