"""Names of Accelerate's Accelerator: every public one is answered, or named with what to write instead."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest

from hasten import Accelerator, DistributedType
from hasten.accelerator.established import INSTEAD, VALUES, distributed_type
from hasten.extensions.migrate.migrating import migrate
from hasten.runtime.context import ProcessContext
from hasten.testing.pool import ranks

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


def test_every_established_name_is_answered_or_says_what_to_write() -> None:
    accelerator = Accelerator(cpu=True)
    for name in NAMES:
        if name in INSTEAD:
            with pytest.raises(AttributeError, match=f"no '{name}', which Accelerate's has; .{{20}}"):
                getattr(accelerator, name)
        else:
            getattr(accelerator, name)
    assert not set(VALUES) & set(INSTEAD)
    assert {*VALUES, *INSTEAD} <= set(NAMES), "the tables hold established names only"
    with pytest.raises(AttributeError, match="'Accelerator' object has no attribute 'nope'"):
        accelerator.nope  # type: ignore[attr-defined]  # noqa: B018


def test_a_type_equals_the_established_text() -> None:
    assert distributed_type("ddp", "cuda", 2) == "MULTI_GPU"
    assert distributed_type("ddp", "xpu", 2) is DistributedType.MULTI_XPU
    assert distributed_type("pipeline", "cuda", 2) == "MULTI_GPU"
    assert distributed_type("fsdp", "cpu", 1) == "NO"
    assert distributed_type("deepspeed", "cuda", 1) == "DEEPSPEED"
    assert distributed_type("megatron", "cuda", 4) == "MEGATRON_LM"


@ranks(2)
def test_a_run_knows_its_type_and_its_place(ctx: ProcessContext) -> None:
    plain = Accelerator(cpu=True)
    assert (plain.distributed_type, plain.data_parallel_rank) == ("MULTI_CPU", ctx.rank)  # type: ignore[attr-defined]
    assert not plain.multi_device  # type: ignore[attr-defined]
    sharded = Accelerator(cpu=True, strategy="fsdp")
    assert sharded.distributed_type is DistributedType.FSDP  # type: ignore[attr-defined]
    assert sharded.is_fsdp2  # type: ignore[attr-defined]
    assert (sharded.data_parallel_rank, sharded.data_parallel_shard_rank) == (0, ctx.rank)  # type: ignore[attr-defined]


def test_migrate_and_the_docs_name_them_too() -> None:
    done = migrate("from accelerate import Accelerator\na = Accelerator()\na.distributed_type\na.state\n")
    assert [(one.line, "process-wide state" in one.text) for one in done.findings] == [(4, True)]
    text = DOCS.read_text()
    assert [name for name in (*VALUES, *INSTEAD) if f"`{name}`" not in text] == []
