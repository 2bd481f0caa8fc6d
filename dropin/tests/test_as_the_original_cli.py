"""Commands, settings classes and probes answer as the original's do, to the values that its callers compare."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast
from unittest.mock import MagicMock, patch

import numpy as np
import pytest
import torch
import yaml

from accelerate import (
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
    FullyShardedDataParallelPlugin,
    ParallelismConfig,
)
from accelerate._impl.commands.launch_variables import variables_for
from accelerate.commands import estimate
from accelerate.commands import launch as launch_module
from accelerate.commands import to_fsdp2 as fsdp2_module
from accelerate.commands.config import config_args
from accelerate.commands.config.config_args import (
    BaseConfig,
    SageMakerConfig,
    load_config_from_file,
)
from accelerate.commands.launch import launch_command, launch_command_parser
from accelerate.commands.test import test_command as run_checks
from accelerate.commands.utils import CustomArgumentParser
from accelerate.utils import (
    AORecipeKwargs,
    DeepSpeedPlugin,
    DeepSpeedSequenceParallelConfig,
    disable_fsdp_ram_efficient_loading,
    enable_fsdp_ram_efficient_loading,
    environment,
    imports,
    load,
    merge_fsdp_weights,
    save,
)
from accelerate.utils import launch as launch_helpers

# Any in this file: what mocks stand for, and values of flags.
MINIMUM = {"distributed_type": "NO"}
commands: Any = launch_module
to_fsdp2: Any = fsdp2_module
launching: Any = launch_helpers


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    variables = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(variables)


def completed(
    words: str, settings: dict[str, Any] | None, folder: Path
) -> tuple[argparse.Namespace, bool]:
    """What a command line of `accelerate launch` and a settings file give together, and whether the precision is the file's."""
    file = folder / "settings.yaml"
    file_flags = [] if settings is None else ["--config_file", str(file)]
    file.write_text(
        yaml.safe_dump({"compute_environment": "LOCAL_MACHINE", **(settings or {})})
    )
    args, _, from_file = commands._validate_launch_command(
        launch_command_parser().parse_args([*file_flags, *words.split(), "x.py"])
    )
    return args, from_file


# -- settings files ---------------------------------------------------------------------------------------------------


def test_a_file_is_completed_as_it_is_read(tmp_path: Path) -> None:
    config: dict[str, Any] = {
        "distributed_type": "NO",
        "dynamo_backend": "INDUCTOR",
        "fp16": True,
    }
    assert BaseConfig.process_config(config) is config
    assert (
        config["dynamo_config"] == {"dynamo_backend": "INDUCTOR"}
        and "fp16" not in config
    )
    assert (config["mixed_precision"], config["num_processes"], config["use_cpu"]) == (
        "fp16",
        1,
        False,
    )
    assert "num_processes" not in BaseConfig.process_config(
        {"distributed_type": "MULTI_GPU"}
    )
    with pytest.raises(
        ValueError, match="A `distributed_type` must be specified in the config file"
    ):
        BaseConfig.process_config({})
    (tmp_path / "x.yaml").write_text(yaml.safe_dump(MINIMUM))
    assert load_config_from_file(str(tmp_path / "x.yaml")).mixed_precision is None
    assert config_args.default_json_config_file == config_args.default_yaml_config_file


def test_settings_of_the_cloud_name_a_machine_and_a_role() -> None:
    with pytest.raises(TypeError, match="'ec2_instance_type' and 'iam_role_name'"):
        SageMakerConfig("AMAZON_SAGEMAKER", "NO", "no", False, False)
    assert (
        SageMakerConfig(
            "AMAZON_SAGEMAKER", "NO", "no", False, False, "ml", "role"
        ).dynamo_config
        == {}
    )


def test_groups_of_a_file_fill_arguments_under_their_prefix(tmp_path: Path) -> None:
    groups = {
        "fsdp_config": {"offload_params": None, "fsdp_new": 1},
        "fp8_config": {"backend": "TE"},
    }
    groups |= {
        "dynamo_config": {"mode": "max-autotune"},
        "mpirun_config": {"mpirun_ccl": "1"},
    }
    args, _ = completed(
        "--fp8_margin 2", {**MINIMUM, **groups, "fp8_config": {"margin": 9}}, tmp_path
    )
    assert (
        args.fsdp_offload_params,
        args.fsdp_new,
        args.dynamo_mode,
        args.mpirun_ccl,
    ) == (
        None,
        1,
        "max-autotune",
        "1",
    )
    assert args.fp8_margin == 2  # the command line's


def test_the_kind_of_a_file_counts_unless_a_flag_chooses_one(tmp_path: Path) -> None:
    several = {
        "distributed_type": "MULTI_GPU",
        "num_processes": 2,
        "parallelism_config": {"parallelism_config_tp_size": 2},
    }
    args, _ = completed("--use_fsdp", several, tmp_path)
    assert (args.multi_gpu, args.use_parallelism_config) == (False, False)
    args, _ = completed("--cpu", several, tmp_path)
    assert (args.multi_gpu, args.use_parallelism_config, args.use_cpu) == (
        True,
        True,
        False,
    )


@pytest.mark.parametrize(
    ("words", "settings"),
    [("", {"distributed_type": "MULTI_GPU"}), ("--multi_gpu", MINIMUM)],
)
def test_one_device_of_several_is_refused(
    words: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    for ids, machines, refused in (
        ("0", 1, True),
        ("0,1", 1, False),
        ("all", 1, False),
        ("0", 2, False),
    ):
        file_settings = {
            **settings,
            "num_processes": 2,
            "gpu_ids": ids,
            "num_machines": machines,
        }
        if refused:
            with pytest.raises(
                ValueError, match="Less than two GPU ids were configured"
            ):
                completed(words, file_settings, tmp_path)
        else:
            assert completed(words, file_settings, tmp_path)[0].gpu_ids == ids


def test_where_the_precision_of_a_launch_comes_from(tmp_path: Path) -> None:
    assert not completed("", MINIMUM, tmp_path)[1]
    assert completed("", {**MINIMUM, "mixed_precision": "bf16"}, tmp_path)[1]


def test_several_devices_are_all_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    os.environ["OMP_NUM_THREADS"] = "3"
    with (
        patch("torch.cuda.device_count", return_value=4),
        patch("torch.cuda.is_available", return_value=True),
    ):
        args, _ = completed("", None, tmp_path)
        single_process_args, _ = completed("--num_processes 1", None, tmp_path)
    assert (args.num_processes, args.multi_gpu, args.num_cpu_threads_per_process) == (
        4,
        True,
        3,
    )
    assert (
        "\t\tMore than one GPU was found, enabling multi-GPU training.\n" in caplog.text
    )
    assert not single_process_args.multi_gpu


# -- launching --------------------------------------------------------------------------------------------------------


def test_a_launcher_can_be_replaced() -> None:
    with patch("accelerate.commands.launch.simple_launcher") as simple:
        launch_command(launch_command_parser().parse_args(["--cpu", "x.py"]))
    assert simple.call_args.args[0].training_script == "x.py"
    assert launch_command.__module__ == "accelerate.commands.launch"


@pytest.mark.parametrize(
    ("says", "flags"),
    [
        (b"mpirun (Open MPI) 4", ("--hostfile", "-n", "--npernode", "--bind-to")),
        (b"", ("-f", "-n", "-ppn", "")),
    ],
)
def test_flags_of_the_program_that_starts_processes(
    says: bytes, flags: tuple[str, ...]
) -> None:
    installed = patch(
        "accelerate.utils.launch.which",
        side_effect=lambda name: name if name == "mpiexec" else None,
    )
    with installed, patch("subprocess.check_output", return_value=says):
        assert launching._get_mpirun_args() == ("mpiexec", *flags)


def test_torchs_launcher_is_given_the_number_that_was_said(tmp_path: Path) -> None:
    args, _ = completed("--num_processes 0", None, tmp_path)
    with patch("accelerate.utils.launch.is_port_in_use", return_value=False):
        launching.prepare_multi_gpu_env(args)
    assert args.nproc_per_node == "0"


def test_workers_find_what_they_compile_with_and_how_fp8_is_computed() -> None:
    variables = variables_for(
        [
            "--cpu",
            "--dynamo_backend",
            "inductor",
            "--dynamo_use_fullgraph",
            "--mixed_precision",
            "fp8",
            "--fp8_margin",
            "3",
            "x.py",
        ]
    )
    assert (
        variables["ACCELERATE_DYNAMO_BACKEND"] == "INDUCTOR"
        and variables["ACCELERATE_FP8_MARGIN"] == "3"
    )
    assert (
        variables["ACCELERATE_DYNAMO_USE_FULLGRAPH"]
        == variables["ACCELERATE_USE_CPU"]
        == "True"
    )


def test_a_parser_remembers_what_was_stored() -> None:
    parser = CustomArgumentParser("x")
    parser.add_argument("--a_b", type=int)
    parser.add_argument("--more", action="append")
    parser.add_argument("--loud", action="count")
    args = parser.parse_args(
        ["--a-b", "3", "--more", "1", "--more", "2", "--loud", "--loud"]
    )
    assert (args.a_b, args.more, args.loud, args.nondefault) == (
        3,
        ["1", "2"],
        2,
        {"a_b"},
    )


# -- other commands ---------------------------------------------------------------------------------------------------


def test_settings_of_fsdp2_are_written_into_the_mapping(tmp_path: Path) -> None:
    config: dict[str, Any] = {"fsdp_config": {"fsdp_sharding_strategy": "FULL_SHARD"}}
    assert to_fsdp2.convert_config_to_fsdp2(config) is config
    assert config == {
        "fsdp_config": {"fsdp_reshard_after_forward": True, "fsdp_version": 2}
    }
    file = tmp_path / "x.yaml"
    file.touch()
    check = to_fsdp2._validate_to_fsdp2_args
    check(argparse.Namespace(config_file=str(file), overwrite=True, output_file=None))
    with pytest.raises(
        FileExistsError, match="already exists and --overwrite is not set"
    ):
        check(
            argparse.Namespace(
                config_file=str(file), overwrite=False, output_file=str(file)
            )
        )


def test_the_table_of_a_model_that_is_made_by_hand(
    capsys: pytest.CaptureFixture[str],
) -> None:
    args = estimate.estimate_command_parser().parse_args(
        ["made/by-hand", "--dtypes", "float32"]
    )
    with patch.object(
        estimate, "create_empty_model", return_value=torch.nn.Linear(10, 10)
    ) as create_model:
        assert estimate.estimate_command(args) is None
    create_model.assert_called_once_with(
        "made/by-hand", library_name=None, trust_remote_code=False
    )
    assert "│float32│" in capsys.readouterr().out


def test_the_hub_is_asked_by_a_name_that_can_be_replaced() -> None:
    config = pytest.importorskip("transformers").BertConfig(
        hidden_size=8, num_hidden_layers=1, num_attention_heads=1
    )
    hub_info = MagicMock(library_name="transformers", config={"model_type": "bert"})
    with (
        patch.object(estimate, "model_info", return_value=hub_info) as hub_query,
        patch("transformers.AutoConfig.from_pretrained", return_value=config) as read,
    ):
        empty_model = estimate.create_empty_model(
            "made/by-hand", None, access_token="secret"
        )
    assert (
        type(empty_model).__name__ == "BertModel"
        and next(empty_model.parameters()).device.type == "meta"
    )
    hub_query.assert_called_once_with("made/by-hand", token="secret")
    read.assert_called_once_with(
        "made/by-hand", trust_remote_code=False, token="secret"
    )


def test_checks_and_merges_say_how_they_ended(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with patch("accelerate._impl.commands.answered.hasten", return_value=0):
        run_checks(argparse.Namespace(config_file=None))
    assert (
        capsys.readouterr().out
        == "Test is a success! You are ready for your distributed training!\n"
    )
    with pytest.raises(
        ValueError,
        match="Tried to load from nowhere but couldn't find a valid metadata file",
    ):
        merge_fsdp_weights("nowhere", "out")


# -- settings classes -------------------------------------------------------------------------------------------------


def test_a_lone_mesh_replicates_over_every_device() -> None:
    state = MagicMock(num_processes=4, multi_device=True, is_fsdp2=False)
    sizes = ParallelismConfig()
    sizes._validate_accelerator(state)
    assert (
        sizes.dp_replicate_size,
        sizes.total_size,
        sizes._sizes["dp_replicate"],
    ) == (4, 4, 4)
    # the others read different samples
    ParallelismConfig(sp_size=2)._validate_accelerator(state)
    with pytest.raises(
        ValueError, match=r"total_size \(2\) does not match num_processes \(4\)"
    ):
        ParallelismConfig(tp_size=2)._validate_accelerator(state)
    with pytest.raises(ValueError, match="no dimension for FSDP to shard across"):
        ParallelismConfig()._validate_accelerator(
            MagicMock(num_processes=4, multi_device=True, is_fsdp2=True)
        )
    with pytest.raises(AssertionError, match="Parallelism must be one of"):
        sizes._set_size("rows", 2)


def test_a_mesh_belongs_to_one_kind_of_device() -> None:
    sizes = ParallelismConfig(dp_shard_size=2)
    with patch(
        "torch.distributed.device_mesh.init_device_mesh",
        return_value=MagicMock(device_type="cuda"),
    ) as init_mesh:
        sizes.build_device_mesh("cuda")
        assert sizes.device_mesh is None
        assert (
            sizes.get_device_mesh("cuda")
            is init_mesh.return_value
            is sizes.get_device_mesh()
        )
    with pytest.raises(ValueError, match="already created with device type cuda"):
        sizes.get_device_mesh("cpu")
    with (
        patch.dict(os.environ, {"PARALLELISM_CONFIG_CP_BACKEND": "other"}),
        pytest.raises(ValueError, match="cp_backend"),
    ):
        ParallelismConfig()


@pytest.mark.parametrize(
    "kind",
    ["sdpa", "flash_attention_2", "kernels-community/flash-attn2", "org/flash-attn"],
)
def test_attention_over_parts_of_a_sequence(kind: str) -> None:
    assert (
        DeepSpeedSequenceParallelConfig(
            sp_attn_implementation=kind
        ).sp_attn_implementation
        == kind
    )
    with pytest.raises(
        ValueError,
        match=f"Invalid sp_attn_implementation: {kind[:3]}/x. Must be one of",
    ):
        DeepSpeedSequenceParallelConfig(sp_attn_implementation=f"{kind[:3]}/x")


def test_a_recipe_of_torchao_has_its_configuration() -> None:
    recipe = AORecipeKwargs(pad_inner_dim=False)
    assert (recipe.config.pad_inner_dim, recipe.enable_fsdp_float8_all_gather) == (
        False,
        True,
    )
    filled_recipe = AORecipeKwargs(config=recipe.config)
    assert (
        filled_recipe.pad_inner_dim,
        filled_recipe.enable_fsdp_float8_all_gather,
    ) == (None, None)
    missing = patch(
        "accelerate.utils.dataclasses.is_torchao_available", return_value=False
    )
    with missing, pytest.raises(ImportError, match="TorchAO is not available"):
        AORecipeKwargs()


def test_small_checks_of_plugins() -> None:
    model = MagicMock()
    DistributedDataParallelKwargs(
        comm_hook=DDPCommunicationHookType.BF16
    ).register_comm_hook(model)
    assert model.register_comm_hook.call_args.kwargs["state"] is None
    with pytest.raises(ValueError, match="`min_num_params` must be an integer"):
        FullyShardedDataParallelPlugin(
            auto_wrap_policy="size_based_wrap", min_num_params=cast("Any", "9")
        )
    noted = ["- before"]
    with pytest.raises(
        ValueError, match="- before\n- ds train_batch_size=2 vs arg train_batch_size=3"
    ):
        plugin = DeepSpeedPlugin(
            hf_ds_config={"zero_optimization": {}, "train_batch_size": 2}
        )
        plugin.deepspeed_config_process(mismatches=noted, train_batch_size=3)


# -- the environment and the machine ----------------------------------------------------------------------------------


def test_loading_on_the_first_rank_is_asked_of_libraries_that_look_for_fsdp() -> None:
    os.environ.pop("ACCELERATE_USE_FSDP", None)
    enable_fsdp_ram_efficient_loading()
    assert (
        os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"],
        os.environ["ACCELERATE_USE_FSDP"],
    ) == ("True", "True")
    os.environ["ACCELERATE_USE_FSDP"] = "false"
    disable_fsdp_ram_efficient_loading()
    enable_fsdp_ram_efficient_loading()
    assert os.environ["ACCELERATE_USE_FSDP"] == "false"


def test_probes_look_anew_and_ask_for_versions() -> None:
    variable = "PYTORCH_NVML_BASED_CUDA_CHECK"
    with patch(
        "torch.cuda.is_available", side_effect=lambda: os.environ.get(variable) == "1"
    ):
        assert imports.is_cuda_available()
    assert (
        variable not in os.environ
        and imports.is_cuda_available() is torch.cuda.is_available()
    )
    with (
        patch("torch.backends.mps.is_available", return_value=True),
        patch("torch.backends.mps.is_built"),
    ):
        assert imports.is_mps_available() and not imports.is_mps_available("99.0")
    with patch("accelerate.utils.imports.is_torch_xla_available", return_value=True):
        assert imports.is_bf16_available() and not imports.is_bf16_available(
            ignore_tpu=True
        )
    with patch("accelerate.utils.imports._is_package_available", return_value=True):
        assert (
            imports.is_amdsmi_available() and imports.is_transformer_engine_available()
        )
    for kind in ("hpu", "mlu", "musa", "neuron", "npu", "sdaa", "torch_xla", "xpu"):
        getattr(imports, f"is_{kind}_available").cache_clear()
    with pytest.raises(AssertionError, match="cannot both be true"):
        imports.is_torch_xla_available(check_is_tpu=True, check_is_gpu=True)
    assert imports.is_lomo_available.__name__ == "is_lomo_available"


def test_a_machine_that_cannot_be_asked_has_no_known_fault() -> None:
    with patch("accelerate.utils.environment.get_gpu_info", side_effect=RuntimeError):
        assert environment.check_cuda_p2p_ib_support()
    assert environment.parse_choice_from_env("NOT_SET", cast("Any", None)) == "None"


def test_states_of_numpys_generators_are_read_without_code(tmp_path: Path) -> None:
    drawn: Any = np.random.RandomState(3).get_state()
    save({"state": drawn}, tmp_path / "x.pt")
    assert np.array_equal(load(tmp_path / "x.pt")["state"][1], drawn[1])
