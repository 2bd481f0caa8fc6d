"""Names of Accelerate's Accelerator: every public one is in hasten's, or named with what to write instead."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest

from hasten import Accelerator
from hasten.extensions.migrate.attributes import INSTEAD
from hasten.extensions.migrate.migrating import migrate

NAMES: Final = [
    "accumulate",
    "ao_recipe_handler",
    "autocast",
    "autocast_handler",
    "backward",
    "check_trigger",
    "clear",
    "clip_grad_norm_",
    "clip_grad_value_",
    "context_parallel_rank",
    "data_parallel_rank",
    "data_parallel_shard_rank",
    "dataloader_config",
    "ddp_handler",
    "deepspeed_plugin",
    "deepspeed_ulysses_dl_adapter",
    "delayed_fp8_autocast",
    "device",
    "device_placement",
    "dispatch_batches",
    "distributed_type",
    "end_training",
    "even_batches",
    "flag_tensor",
    "fp8_backend",
    "fp8_enabled",
    "fp8_recipe_handler",
    "free_memory",
    "gather",
    "gather_for_metrics",
    "get_state_dict",
    "get_tracker",
    "gradient_accumulation_steps",
    "gradient_state",
    "has_fp8_handler",
    "has_lomo_optimizer",
    "init_handler",
    "init_trackers",
    "is_composable_parallelism_enabled",
    "is_fsdp2",
    "is_last_process",
    "is_local_main_process",
    "is_main_process",
    "join_uneven_inputs",
    "load_state",
    "local_main_process_first",
    "local_process_index",
    "log",
    "log_with",
    "logging_dir",
    "lomo_backward",
    "main_process_first",
    "maybe_context_parallel",
    "mixed_precision",
    "msamp_recipe_handler",
    "multi_device",
    "native_amp",
    "no_sync",
    "non_blocking",
    "num_processes",
    "on_last_process",
    "on_local_main_process",
    "on_local_process",
    "on_main_process",
    "on_process",
    "optimizer_step_was_skipped",
    "pad_across_processes",
    "parallelism_config",
    "pipeline_parallel_rank",
    "prepare",
    "prepare_data_loader",
    "prepare_model",
    "prepare_optimizer",
    "prepare_scheduler",
    "print",
    "process_index",
    "profile",
    "profile_handler",
    "project_configuration",
    "project_dir",
    "reduce",
    "register_for_checkpointing",
    "register_load_state_pre_hook",
    "register_save_state_pre_hook",
    "rng_types",
    "save",
    "save_iteration",
    "save_model",
    "save_state",
    "scaler",
    "scaler_handler",
    "set_trigger",
    "should_save_model",
    "skip_first_batches",
    "split_batches",
    "split_between_processes",
    "state",
    "step",
    "step_scheduler_with_optimizer",
    "sync_gradients",
    "te_recipe_handler",
    "tensor_parallel_rank",
    "torch_device_mesh",
    "trackers",
    "trigger_sync_in_backward",
    "unscale_gradients",
    "unwrap_model",
    "use_distributed",
    "use_seedable_sampler",
    "use_stateful_dataloader",
    "verify_device_map",
    "wait_for_everyone",
]
"""dir() of Accelerate 1.15's Accelerator, less the private ones."""
DOCS: Final = Path(__file__).parents[3] / "docs" / "migration" / "accelerate.md"


def test_every_established_name_is_there_or_has_a_replacement() -> None:
    accelerator = Accelerator(cpu=True)
    for name in NAMES:
        assert hasattr(accelerator, name) is (name not in INSTEAD), name
    assert set(INSTEAD) <= set(NAMES), "the table holds established names only"
    with pytest.raises(AttributeError, match="has no attribute 'nope'"):
        accelerator.nope  # type: ignore[attr-defined]  # noqa: B018


def test_the_page_and_the_command_name_the_replacements() -> None:
    done = migrate(
        "from accelerate import Accelerator\na = Accelerator()\na.distributed_type\na.num_processes\n"
    )
    assert [finding.line for finding in done.findings] == [3]
    assert INSTEAD["distributed_type"] in done.findings[0].text
    text = DOCS.read_text()
    assert [name for name in INSTEAD if f"`{name}`" not in text] == []
