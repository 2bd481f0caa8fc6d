"""Hugging Face Accelerate's files mean in our terms what they say: written by its own command, and by hand per backend."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest
import yaml

from hasten.config import files
from hasten.config.established import nested_names
from hasten.config.resolve import resolve
from hasten.config.schema import BY_PATH

TEST_FOLDER: Final = Path(__file__).parent
EXPECTED: Final = yaml.safe_load(
    (TEST_FOLDER / "accelerate_expected.yaml").read_text("utf-8")
)
DOCUMENTED: Final = {
    "fsdp_config": """fsdp_version fsdp_offload_params fsdp_min_num_params fsdp_sharding_strategy fsdp_reshard_after_forward
        fsdp_auto_wrap_policy fsdp_transformer_layer_cls_to_wrap fsdp_backward_prefetch fsdp_backward_prefetch_policy
        fsdp_state_dict_type fsdp_forward_prefetch fsdp_use_orig_params fsdp_cpu_ram_efficient_loading
        fsdp_sync_module_states fsdp_activation_checkpointing fsdp_ignored_modules""",
    "deepspeed_config": """deepspeed_config_file zero_stage offload_optimizer_device offload_param_device
        offload_optimizer_nvme_path offload_param_nvme_path gradient_accumulation_steps gradient_clipping zero3_init_flag
        zero3_save_16bit_model deepspeed_hostfile deepspeed_exclusion_filter deepspeed_inclusion_filter
        deepspeed_multinode_launcher deepspeed_moe_layer_cls_names""",
    "megatron_lm_config": """megatron_lm_tp_degree megatron_lm_pp_degree megatron_lm_num_micro_batches
        megatron_lm_sequence_parallelism megatron_lm_recompute_activations megatron_lm_recompute_granularity
        megatron_lm_recompute_method megatron_lm_recompute_num_layers megatron_lm_use_distributed_optimizer
        megatron_lm_gradient_clipping megatron_lm_use_custom_fsdp megatron_lm_no_load_optim megatron_lm_no_save_optim
        megatron_lm_eod_mask_loss megatron_lm_optimizer_cpu_offload megatron_lm_overlap_cpu_optimizer_d2h_h2d
        megatron_lm_use_precision_aware_optimizer megatron_lm_decoder_last_pipeline_num_layers
        megatron_lm_attention_backend megatron_lm_expert_model_parallel_size megatron_lm_expert_tensor_parallel_size
        megatron_lm_context_parallel_size megatron_lm_attention_dropout megatron_lm_hidden_dropout
        megatron_lm_attention_softmax_in_fp32 megatron_lm_calculate_per_token_loss
        megatron_lm_use_rotary_position_embeddings""",
    "dynamo_config": """dynamo_backend dynamo_mode dynamo_use_fullgraph dynamo_use_dynamic
        dynamo_use_regional_compilation""",
    "parallelism_config": """parallelism_config_dp_replicate_size parallelism_config_dp_shard_size
        parallelism_config_tp_size parallelism_config_cp_size parallelism_config_cp_backend
        parallelism_config_cp_comm_strategy parallelism_config_sp_size parallelism_config_sp_backend
        parallelism_config_sp_seq_length parallelism_config_sp_seq_length_is_variable
        parallelism_config_sp_attn_implementation""",
    "fp8_config": """backend use_autocast_during_eval margin interval fp8_format amax_history_len amax_compute_algo
        override_linear_precision opt_level enable_fsdp_float8_all_gather pad_inner_dim use_mxfp8_block_scaling
        amax_history_length amax_compute_algorithm optimization_level""",
    "mpirun_config": "mpirun_hostfile mpirun_ccl",
}


@pytest.mark.parametrize("name", EXPECTED)
def test_file_means_what_it_says(name: str) -> None:
    file = files.read_text(
        (TEST_FOLDER / "accelerate" / name).read_text("utf-8"), Path(name)
    )
    resolved = resolve(file=file.entries, notes=file.notes)
    assert file.kind == "accelerate"
    assert files.to_mapping(resolved.config) == EXPECTED[name]["settings"]
    assert resolved.notes[0].startswith(f"{name} is a Hugging Face Accelerate file")
    assert list(resolved.notes[1:]) == EXPECTED[name]["notes"]


def test_every_sample_has_its_meaning_written_down() -> None:
    assert {path.name for path in (TEST_FOLDER / "accelerate").iterdir()} == set(
        EXPECTED
    )


@pytest.mark.parametrize("name", EXPECTED)
def test_written_in_our_terms_it_means_the_same(name: str) -> None:
    first = files.read_text(
        (TEST_FOLDER / "accelerate" / name).read_text("utf-8"), Path(name)
    )
    config = resolve(file=first.entries).config
    hasten_file = files.read_text(files.dump(config), Path("ours.yaml"))
    assert hasten_file.kind == "hasten"
    assert resolve(file=hasten_file.entries).config == config


@pytest.mark.parametrize("key", DOCUMENTED)
def test_every_documented_nested_key_is_known(key: str) -> None:
    accepted_names = nested_names(key)
    missing = [name for name in DOCUMENTED[key].split() if name not in accepted_names]
    assert not missing
    paths = {path for path in accepted_names.values() if path and path[0] != "fsdp"}
    assert paths <= set(BY_PATH)


def test_every_documented_top_level_key_is_known() -> None:
    keys = [
        "compute_environment",
        "distributed_type",
        "mixed_precision",
        "use_cpu",
        "debug",
        "enable_cpu_affinity",
        "dynamo_config",
        "num_processes",
        "machine_rank",
        "num_machines",
        "gpu_ids",
        "main_process_ip",
        "main_process_port",
        "rdzv_backend",
        "same_network",
        "main_training_function",
        "fp8_config",
        "deepspeed_config",
        "fsdp_config",
        "parallelism_config",
        "megatron_lm_config",
        "mpirun_config",
        "downcast_bf16",
        "tpu_name",
        "tpu_zone",
        "tpu_use_cluster",
        "tpu_use_sudo",
        "command_file",
        "commands",
        "tpu_vm",
        "tpu_env",
        "use_fsdp",
        "use_ddp",
        "use_deepspeed",
        "use_megatron_lm",
        "use_parallelism_config",
    ]
    values = {"compute_environment": "LOCAL_MACHINE", "distributed_type": "'NO'"}
    text = "".join(f"{key}: {values.get(key, 'null')}\n" for key in keys)
    assert files.read_text(text, Path("c.yaml")).entries == ()


def test_flag_outranks_the_file_where_training_runs() -> None:
    text = (
        (TEST_FOLDER / "accelerate" / "multi_gpu.yaml")
        .read_text("utf-8")
        .replace("gpu_ids: 0,2\n", "")
    )
    file = files.read_text(text, Path("c.yaml"))
    resolved = resolve(file=file.entries, env={"HASTEN_CPU": "1"})
    assert resolved.config.cpu
    assert not resolved.config.launch.multi_gpu
    assert (
        "cpu (environment HASTEN_CPU) outranks launch.multi_gpu (c.yaml:3)"
        in resolved.notes
    )
