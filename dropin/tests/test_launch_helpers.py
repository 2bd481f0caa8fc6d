"""Launch helpers, settings files and parsers: variables, records and messages of the original, and replaced names that act."""

from __future__ import annotations

import json
import logging
import os
import pickle
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import yaml

import accelerate.commands.launch as launching
import accelerate.utils.launch
import accelerate.utils.other
from accelerate.commands.accelerate_cli import main
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.config.default import write_basic_config
from accelerate.commands.estimate import estimate_command_parser
from accelerate.commands.launch import launch_command_parser
from accelerate.commands.to_fsdp2 import convert_config_to_fsdp2
from accelerate.test_utils.training import mocked_dataloaders
from accelerate.utils import patch_environment, purge_accelerate_environment
from accelerate.utils.environment import CPUInformation, get_cpu_distributed_information
from accelerate.utils.launch import (
    prepare_deepspeed_cmd_env,
    prepare_multi_gpu_env,
    prepare_simple_launcher_cmd_env,
)

# Any in this file: namespaces of argparse.
SETTINGS = {
    "compute_environment": "LOCAL_MACHINE",
    "distributed_type": "NO",
    "num_processes": 1,
    "use_cpu": True,
}


def parsed(*words: str) -> Any:
    validate = getattr(launching, "_validate_launch_command")  # noqa: B009  type checkers do not see what faces take from elsewhere
    parsed_args = validate(launch_command_parser().parse_args([*words, "train.py"]))[0]
    assert isinstance(parsed_args, Namespace)
    return parsed_args


def test_workers_under_fsdp_find_every_variable() -> None:
    flags = "--use_fsdp --num_processes 2 --fsdp_offload_params True --fsdp_transformer_layer_cls_to_wrap Block"
    with mock.patch("accelerate.utils.launch.is_port_in_use", return_value=False):
        env = prepare_multi_gpu_env(parsed(*flags.split()))
    fsdp_variables = {
        name: value for name, value in env.items() if name.startswith("FSDP_")
    }
    assert fsdp_variables == {
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
    args = parsed(
        "--use_deepspeed",
        "--num_processes",
        "2",
        "--zero_stage",
        "3",
        "--zero3_init_flag",
        "True",
    )
    with mock.patch("accelerate.utils.launch.is_port_in_use", return_value=False):
        command, env = prepare_deepspeed_cmd_env(args)
        megatron = prepare_multi_gpu_env(
            parsed("--use_megatron_lm", "--num_processes", "2")
        )
    assert (
        command is None and args.nproc_per_node == "2" and args.master_port == "29500"
    )
    assert (
        env["ACCELERATE_DEEPSPEED_ZERO_STAGE"],
        env["ACCELERATE_DEEPSPEED_ZERO3_INIT"],
    ) == ("3", "true")
    assert "ACCELERATE_GRADIENT_CLIPPING" not in env
    assert (
        megatron["MEGATRON_LM_TP_DEGREE"],
        megatron["MEGATRON_LM_GRADIENT_CLIPPING"],
    ) == ("1", "1.0")
    _, cpu_variables = prepare_simple_launcher_cmd_env(
        parsed("--cpu", "--num_cpu_threads_per_process", "3")
    )
    assert (
        cpu_variables["ACCELERATE_USE_CPU"],
        cpu_variables["OMP_NUM_THREADS"],
        cpu_variables["KMP_BLOCKTIME"],
    ) == ("True", "3", "1")


def test_a_taken_port_is_told_and_a_second_machine_is_refused() -> None:
    with mock.patch("accelerate.utils.launch.is_port_in_use", return_value=True):
        args = parsed("--multi_gpu", "--num_processes", "2")
        with pytest.warns(UserWarning, match="standalone-like mode"):
            prepare_multi_gpu_env(args)
        assert args.standalone is True
        machine_flags = [
            "--num_machines",
            "2",
            "--machine_rank",
            "0",
            "--main_process_ip",
            "1.2.3.4",
        ]
        with pytest.raises(ConnectionError, match="another process is utilizing it"):
            prepare_multi_gpu_env(
                parsed("--multi_gpu", "--num_processes", "4", *machine_flags)
            )


def test_deepspeeds_own_launcher_is_given_the_port_that_was_settled() -> None:
    words = [
        "--use_deepspeed",
        "--num_machines",
        "2",
        "--num_processes",
        "4",
        "--machine_rank",
        "0",
        "--main_process_ip",
        "1.2.3.4",
    ]
    free = mock.patch("accelerate.utils.launch.is_port_in_use", return_value=False)
    with free, mock.patch("accelerate.utils.launch.get_free_port", return_value=4242):
        for port, settled in ((None, "29500"), (0, "4242"), (77, "77")):
            args = parsed(
                *words, *([] if port is None else ["--main_process_port", str(port)])
            )
            command, _ = prepare_deepspeed_cmd_env(args)
            assert (
                command is not None
                and command[command.index("--master_port") + 1] == settled
            )
            assert args.main_process_port == int(settled)
    with mock.patch("accelerate.utils.launch.is_port_in_use", return_value=True):
        with pytest.raises(ConnectionError, match="another process is utilizing it"):
            prepare_deepspeed_cmd_env(parsed(*words))
        words[words.index("0")] = "1"  # whose first process is elsewhere
        assert prepare_deepspeed_cmd_env(parsed(*words))[0] is not None


def test_the_parser_of_launch_is_loaded_without_training() -> None:
    code = "import sys, accelerate.commands.launch as it; it.launch_command_parser(); print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    assert not {
        "accelerate.state",
        "hasten.checkpoint.export",
        "hasten.comm.process_group",
    } & {*loaded}
    assert (
        accelerate.utils.launch.is_port_in_use is accelerate.utils.other.is_port_in_use
    )


def test_a_replaced_name_acts_and_comes_back() -> None:
    original_which = accelerate.utils.launch.which
    words = ["--cpu", "--num_processes", "4", "--mpirun_hostfile", "hosts"]
    with (
        mock.patch(
            "accelerate.utils.launch.which", side_effect=lambda name: name == "mpirun"
        ),
        mock.patch(
            "accelerate.utils.launch.subprocess.check_output",
            return_value=b"Open MPI 4",
        ),
    ):
        command, _ = prepare_simple_launcher_cmd_env(parsed(*words))
    assert command[:7] == [
        "mpirun",
        "--hostfile",
        "hosts",
        "--npernode",
        "4",
        "-n",
        "4",
    ]
    assert accelerate.utils.launch.which is original_which
    with pytest.raises(OSError, match="mpirun or mpiexec were not found"):
        prepare_simple_launcher_cmd_env(parsed(*words))


def test_defaults_that_were_used_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "accelerate.commands.launch"):
        parsed("--cpu", "--num_processes", "1", "--mixed_precision", "bf16")
    assert (
        "`--num_machines` was set to a value of `1`" in caplog.text
        and "mixed_precision" not in caplog.text
    )


def test_unknown_keys_are_named_in_the_words_of_the_original(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text(yaml.safe_dump({**SETTINGS, "invalid": 1, "another": 2}))
    monkeypatch.setattr(
        "sys.argv", ["accelerate", "launch", "--config_file", str(file), "train.py"]
    )
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert (
        f"The config file at {file} had unknown keys (['another', 'invalid'])"
        in capsys.readouterr().err
    )


def test_what_fsdp2_lacks_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    converted = convert_config_to_fsdp2(
        {"fsdp_config": {"fsdp_version": 1, "fsdp_use_orig_params": True}}
    )
    assert converted == {"fsdp_config": {"fsdp_version": 2}}
    assert convert_config_to_fsdp2(converted) is converted and convert_config_to_fsdp2(
        {"num_processes": 1}
    ) == {"num_processes": 1}
    assert [record.getMessage() for record in caplog.records][:2] == [
        "Argument fsdp_use_orig_params has been removed in FSDP2, skipping this key...",
        "Config already specifies FSDP2, skipping conversion...",
    ]


def test_a_file_for_this_machine_is_json_and_yaml(tmp_path: Path) -> None:
    file = write_basic_config(save_location=str(tmp_path / "default.yaml"))
    assert (
        file
        and json.loads(file.read_text()) == load_config_from_file(str(file)).to_dict()
    )


def test_namespaces_name_what_was_given() -> None:
    args = estimate_command_parser().parse_args(["bert", "--dtypes", "int8"])
    assert args.nondefault == {"model_name", "dtypes"} and not hasattr(args, "func")


def test_each_kind_of_launch_has_its_launcher(tmp_path: Path) -> None:
    """`launch_command` asks the launcher of its module, so that one put in its place acts."""
    file = tmp_path / "settings.yaml"
    file.write_text(
        yaml.safe_dump(
            {
                **SETTINGS,
                "distributed_type": "MULTI_XPU",
                "num_processes": 2,
                "use_cpu": False,
            }
        )
    )
    kinds = {
        "--cpu": "simple",
        "--multi_gpu --num_processes=2": "multi_gpu",
        "--use_fsdp": "multi_gpu",
        "--use_deepspeed": "deepspeed",
        "--tpu": "tpu",
        "--tpu --tpu_cluster": "tpu_pod",
        f"--config_file={file}": "multi_gpu",
    }
    for words, name in kinds.items():
        with mock.patch(f"accelerate.commands.launch.{name}_launcher") as started:
            launching.launch_command(
                launch_command_parser().parse_args([*words.split(), "train.py"])
            )
        assert started.call_count == 1, words
    with pytest.raises(ValueError, match="only use one of"):
        launching.launch_command(
            launch_command_parser().parse_args(["--cpu", "--multi_gpu", "train.py"])
        )


def test_devices_that_are_not_there_are_told_and_the_cpu_is_used(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os; print('of', os.environ.get('WORLD_SIZE', '1'), flush=True)"
    )
    for words, processes in (
        (["--multi_gpu", "--num_processes", "2"], 2),
        (["--gpu_ids", "0"], 1),
    ):
        monkeypatch.setattr("sys.argv", ["accelerate", "launch", *words, str(script)])
        main()
        out, err = capfd.readouterr()
        assert (
            out.count(f"of {processes}") == processes
            and "no accelerator was found" in err
        )


def test_a_wrong_command_line_is_told_in_the_words_of_the_original(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "sys.argv", ["accelerate", "launch", "--cpu", "--multi_gpu", "train.py"]
    )
    with pytest.raises(SystemExit):
        main()
    assert (
        "ValueError: You can only use one of `--cpu`, `--multi_gpu`"
        in capsys.readouterr().err
    )


def test_the_parser_has_the_groups_and_types_of_the_original() -> None:
    parser = launch_command_parser()
    assert (
        "FSDP Arguments:" in parser.format_help()
        and "Megatron-LM Arguments:" in parser.format_help()
    )
    args = parser.parse_args(
        [
            "--fp8_override_linear_precision",
            "yes,no,yes",
            "--fp8-pad-inner-dim",
            "no",
            "train.py",
        ]
    )
    assert (args.fp8_override_linear_precision, args.fp8_pad_inner_dim) == (
        (1, 0, 1),
        0,
    )
    assert args.nondefault == {
        "fp8_override_linear_precision",
        "fp8_pad_inner_dim",
        "training_script",
        "training_script_args",
    }
    with pytest.raises(SystemExit):
        parser.parse_args(["--fp8_format", "other", "train.py"])


def test_commands_are_listed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["accelerate"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1
    listed = (
        "{config,estimate-memory,env,launch,merge-weights,tpu-config,test,to-fsdp2}"
    )
    assert listed in capsys.readouterr().out


def test_tests_and_those_of_subclasses_leave_no_variable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    @purge_accelerate_environment
    class Base:
        def setUp(self) -> None:
            os.environ["ACCELERATE_OF_THE_CASE"] = "1"

        def test_one(self) -> str:
            os.environ["ACCELERATE_OF_THE_TEST"] = "1"
            return os.environ["ACCELERATE_OF_THE_CASE"]

    class Derived(Base):
        def test_two(self) -> str:
            return self.test_one()

    for name in ("ACCELERATE_OF_THE_CASE", "ACCELERATE_OF_THE_TEST"):
        monkeypatch.setenv(name, "0")
        monkeypatch.delenv(name)
    case = Derived()
    case.setUp()
    assert (
        case.test_one() == case.test_two() == "1"
        and "ACCELERATE_OF_THE_TEST" not in os.environ
    )


def test_the_place_of_a_process_has_four_numbers() -> None:
    with patch_environment(rank=1, world_size=4, local_rank=1, local_world_size=2):
        information = get_cpu_distributed_information()
    assert (
        information == CPUInformation(1, 4, 1, 2)
        and pickle.loads(pickle.dumps(information)) == information
    )


def test_samples_of_examples_become_loaders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("datasets")
    transformers = pytest.importorskip("transformers")
    folder = tmp_path / "tests" / "test_samples" / "MRPC"
    folder.mkdir(parents=True)
    rows = "".join(
        f"{'yes' if row % 2 else 'no'},a {row},b {row}\n" for row in range(5)
    )
    for name in ("train", "dev"):
        (folder / f"{name}.csv").write_text(f"label,sentence1,sentence2\n{rows}")
    tokenizer = mock.Mock(
        side_effect=lambda first, second, **options: {
            "input_ids": [[1, 2]] * len(first)
        }
    )
    tokenizer.pad = lambda examples, **options: (
        options["padding"],
        [example["labels"] for example in examples],
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    with mock.patch.object(
        transformers.AutoTokenizer, "from_pretrained", return_value=tokenizer
    ):
        train, test_loader = mocked_dataloaders(Namespace(distributed_type="NO"))
    assert train.batch_size == 2 and list(test_loader) == [
        ("longest", [row % 2]) for row in range(5)
    ]
