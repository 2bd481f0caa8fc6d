"""The flags of `accelerate launch`: name, attribute (- where the same), kind, short form; and a namespace as a command line."""

from __future__ import annotations

import argparse

FLAGS = """
    config_file - str -
    quiet - switch -q
    cpu - switch -
    multi_gpu - switch -
    tpu - switch -
    mixed_precision - str -
    num_processes - int -
    num_machines - int -
    num_cpu_threads_per_process - int -
    enable_cpu_affinity - switch -
    dynamo_backend - str -
    dynamo_mode - str -
    dynamo_use_fullgraph - switch -
    dynamo_use_dynamic - switch -
    dynamo_use_regional_compilation - switch -
    use_deepspeed - switch -
    use_fsdp - switch -
    use_parallelism_config - switch -
    use_megatron_lm - switch -
    gpu_ids - str -
    same_network - switch -
    machine_rank - int -
    main_process_ip - str -
    main_process_port - int -
    tee - str -t
    log_dir - str -
    role - str -
    rdzv_backend - str -
    rdzv_conf - str -
    max_restarts - int -
    monitor_interval - float -
    module - switch -m
    no_python - switch -
    tpu_cluster tpu_use_cluster switch -
    no_tpu_cluster tpu_use_cluster off -
    tpu_use_sudo - switch -
    vm - append -
    env - append -
    main_training_function - str -
    downcast_bf16 - switch -
    deepspeed_config_file - str -
    zero_stage - int -
    offload_optimizer_device - str -
    offload_param_device - str -
    offload_optimizer_nvme_path - str -
    offload_param_nvme_path - str -
    gradient_accumulation_steps - int -
    gradient_clipping - float -
    zero3_init_flag - str -
    zero3_save_16bit_model - str -
    deepspeed_hostfile - str -
    deepspeed_exclusion_filter - str -
    deepspeed_inclusion_filter - str -
    deepspeed_multinode_launcher - str -
    deepspeed_moe_layer_cls_names - str -
    fsdp_version - str -
    fsdp_offload_params - str -
    fsdp_min_num_params - int -
    fsdp_sharding_strategy - str -
    fsdp_reshard_after_forward - str -
    fsdp_auto_wrap_policy - str -
    fsdp_transformer_layer_cls_to_wrap - str -
    fsdp_backward_prefetch - str -
    fsdp_state_dict_type - str -
    fsdp_forward_prefetch - str -
    fsdp_use_orig_params - str -
    fsdp_cpu_ram_efficient_loading - str -
    fsdp_sync_module_states - str -
    fsdp_activation_checkpointing - str -
    fsdp_activation_checkpointing_offload - str -
    megatron_lm_tp_degree - int -
    megatron_lm_use_custom_fsdp - bool -
    megatron_lm_no_load_optim - bool -
    megatron_lm_eod_mask_loss - bool -
    megatron_lm_overlap_cpu_optimizer_d2h_h2d - bool -
    megatron_lm_no_save_optim - bool -
    megatron_lm_optimizer_cpu_offload - bool -
    megatron_lm_use_precision_aware_optimizer - bool -
    megatron_lm_decoder_last_pipeline_num_layers - int -
    megatron_lm_pp_degree - int -
    megatron_lm_num_micro_batches - int -
    megatron_lm_sequence_parallelism - str -
    megatron_lm_recompute_activations - str -
    megatron_lm_use_distributed_optimizer - str -
    megatron_lm_gradient_clipping - float -
    megatron_lm_recompute_granularity - str -
    megatron_lm_recompute_method - str -
    megatron_lm_recompute_num_layers - int -
    megatron_lm_attention_backend - str -
    megatron_lm_expert_model_parallel_size - int -
    megatron_lm_context_parallel_size - int -
    megatron_lm_attention_dropout - float -
    megatron_lm_hidden_dropout - float -
    megatron_lm_attention_softmax_in_fp32 - str -
    megatron_lm_expert_tensor_parallel_size - int -
    megatron_lm_calculate_per_token_loss - str -
    megatron_lm_use_rotary_position_embeddings - str -
    fp8_backend - str -
    fp8_use_autocast_during_eval - switch -
    fp8_margin - int -
    fp8_interval - int -
    fp8_format - str -
    fp8_amax_history_len - int -
    fp8_amax_compute_algo - str -
    fp8_override_linear_precision - str -
    fp8_opt_level - str -
    fp8_enable_fsdp_float8_all_gather - str_to_bool -
    fp8_pad_inner_dim - str_to_bool -
    aws_access_key_id - str -
    aws_secret_access_key - str -
    debug - switch -
    mpirun_hostfile - str -
    parallelism_config_dp_replicate_size - int -
    parallelism_config_dp_shard_size - int -
    parallelism_config_tp_size - int -
    parallelism_config_cp_size - int -
    parallelism_config_cp_backend - str -
    parallelism_config_cp_comm_strategy - str -
    parallelism_config_sp_size - int -
    parallelism_config_sp_backend - str -
    parallelism_config_sp_seq_length - str -
    parallelism_config_sp_seq_length_is_variable - bool -
    parallelism_config_sp_attn_implementation - str -
"""


def words_of(args: argparse.Namespace) -> list[str]:
    """The command line for hasten that a parsed namespace stands for."""
    words: list[str] = []
    for row in FLAGS.split("\n"):
        if not row.strip():
            continue
        name, dest, kind, _ = row.split()
        value = getattr(args, name.replace("-", "_") if dest == "-" else dest, None)
        if value is None or value is False or kind == "off":
            continue
        for one in value if isinstance(value, list) else [value]:
            words.append(f"--{name}=true" if kind == "switch" else f"--{name}={one}")
    return [*words, args.training_script, *args.training_script_args]
