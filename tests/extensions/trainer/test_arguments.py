"""TrainingArguments: every name acts or is refused, values are checked, defaults leave the facade's settings alone."""

from __future__ import annotations

import ast
import math
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import hasten
from hasten import TrainingArguments
from hasten.errors import (
    ConfigError,
    ContradictionError,
    SettingValueError,
    UnknownSettingError,
)
from hasten.extensions.trainer.settings import accelerator_settings
from hasten.extensions.trainer.step_plan import plan_training
from hasten.testing.toys import TinyLM
from tests.support.toys import Scored

ROOM = Path(hasten.__file__).parent / "extensions/trainer"


def read_names() -> set[str]:
    """The attributes that the room takes from something called args, or from self inside the class."""
    attribute_names = set()
    for file in ROOM.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(node, ast.Attribute):
                owner = node.value
                name = (
                    owner.attr
                    if isinstance(owner, ast.Attribute)
                    else getattr(owner, "id", "")
                )
                if name == "args" or (file.name == "arguments.py" and name == "self"):
                    attribute_names.add(node.attr)
    return attribute_names


@pytest.mark.parametrize("name", [field.name for field in fields(TrainingArguments)])
def test_every_argument_is_read(name: str) -> None:
    assert name in read_names(), f"{name} would have no effect; read it or refuse it"


def test_an_unknown_name_gets_the_nearest_one() -> None:
    with pytest.raises(UnknownSettingError, match="did you mean 'learning_rate'"):
        TrainingArguments("out", learning_rat=1e-3)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"eval_strategy": "sometimes"}, SettingValueError),
        ({"per_device_train_batch_size": 0}, SettingValueError),
        ({"logging_steps": 0}, SettingValueError),
        ({"max_steps": 0}, SettingValueError),
        ({"save_total_limit": 0}, SettingValueError),
        ({"seed": -1}, SettingValueError),
        ({"adam_beta1": 2.0}, SettingValueError),
        ({"adam_beta2": 1.0}, SettingValueError),
        ({"adam_epsilon": -1e-8}, SettingValueError),
        ({"bf16": True, "fp16": True}, ContradictionError),
        ({"warmup_steps": 2, "warmup_ratio": 0.1}, ContradictionError),
        ({"load_best_model_at_end": True}, ContradictionError),
        ({"load_best_model_at_end": True, "eval_strategy": "epoch"}, ContradictionError),
        ({"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 3, "save_steps": 5}, ContradictionError),
        ({"dataloader_prefetch_factor": 2}, ContradictionError),
        ({"dataloader_persistent_workers": True}, ContradictionError),
        ({"deepspeed": "x.json", "fsdp": True}, ContradictionError),
    ],
)  # fmt: skip
def test_wrong_values_are_refused(
    changes: dict[str, Any], kind: type[Exception]
) -> None:
    with pytest.raises(kind):
        TrainingArguments("out", **changes)


@pytest.mark.parametrize(
    ("changes", "remedy"),
    [
        ({"eval_steps": 50}, "set eval_strategy='steps'"),
        ({"eval_steps": 50, "eval_strategy": "epoch"}, "set eval_strategy='steps'"),
        ({"metric_for_best_model": "accuracy"}, "set eval_strategy"),
        ({"greater_is_better": False}, "set metric_for_best_model"),
        (
            {"greater_is_better": True, "eval_strategy": "epoch"},
            "set metric_for_best_model",
        ),
        ({"save_total_limit": 2, "save_strategy": "no"}, "set save_strategy"),
        ({"save_steps": 10, "save_strategy": "epoch"}, "set save_strategy='steps'"),
        (
            {"logging_steps": 10, "logging_strategy": "epoch"},
            "set logging_strategy='steps'",
        ),
        ({"adam_beta1": 0.8, "optim": "sgd"}, "set optim='adamw_torch'"),
        ({"warmup_steps": 5, "lr_scheduler_type": "constant"}, "constant_with_warmup"),
        (
            {"warmup_ratio": 0.1, "lr_scheduler_type": "constant"},
            "constant_with_warmup",
        ),
        ({"ddp_find_unused_parameters": True, "fsdp": True}, "remove it"),
    ],
)
def test_an_argument_that_needs_another_is_refused_without_it(
    changes: dict[str, Any], remedy: str
) -> None:
    with pytest.raises(
        ContradictionError, match=rf"would have no effect: .*; .*{remedy}"
    ):
        TrainingArguments("out", **changes)


@pytest.mark.parametrize(
    "changes",
    [
        {
            "greater_is_better": False,
            "load_best_model_at_end": True,
            "eval_strategy": "epoch",
            "save_strategy": "epoch",
        },
        # also how often to evaluate
        {"logging_steps": 5, "logging_strategy": "epoch", "eval_strategy": "steps"},
        {
            "metric_for_best_model": "accuracy",
            "greater_is_better": True,
            "eval_strategy": "epoch",
        },
        {"eval_steps": 3, "eval_strategy": "steps"},
        {"adam_beta1": 0.8, "optim": "adamw_torch_fused"},
    ],
)
def test_an_argument_beside_what_it_needs_is_taken(changes: dict[str, Any]) -> None:
    TrainingArguments("out", **changes)


@pytest.mark.parametrize(
    "changes",
    [{"warmup_ratio": 2}, {"learning_rate": math.nan}],
)
def test_numbers_out_of_range_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(SettingValueError, match="give a number from 0"):
        TrainingArguments("out", **changes)


def test_defaults_leave_flags_and_files_alone() -> None:
    settings = accelerator_settings(TrainingArguments("out"), Scored())
    assert set(settings) == {"project_config", "dataloader_config", "log_with"}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"bf16": True}, {"mixed_precision": "bf16"}),
        ({"fp16": True}, {"mixed_precision": "fp16"}),
        ({"use_cpu": True}, {"cpu": True}),
        ({"gradient_accumulation_steps": 4}, {"gradient_accumulation_steps": 4}),
        (
            {"report_to": ["jsonl", "tensorboard", "none"]},
            {"log_with": ["jsonl", "tensorboard"]},
        ),
        ({"deepspeed": "x.json"}, {"strategy": "deepspeed"}),
    ],
)
def test_arguments_become_settings_of_the_facade(
    changes: dict[str, Any], expected: dict[str, Any]
) -> None:
    settings = accelerator_settings(TrainingArguments("out", **changes), Scored())
    assert {name: settings[name] for name in expected} == expected


def test_sharding_words_become_the_plugin() -> None:
    settings = accelerator_settings(
        TrainingArguments("out", fsdp="shard_grad_op offload auto_wrap"), Scored()
    )
    assert settings["strategy"] == "fsdp"
    assert settings["fsdp_plugin"].reshard_after_forward is False
    assert settings["fsdp_plugin"].cpu_offload is True
    with pytest.raises(SettingValueError, match="full_sharding"):
        accelerator_settings(TrainingArguments("out", fsdp="full_sharding"), Scored())
    with pytest.raises(ConfigError, match="without fsdp"):
        accelerator_settings(
            TrainingArguments("out", fsdp_config={"min_num_params": 3}), Scored()
        )


def test_compiling_ddp_and_recomputing() -> None:
    args = TrainingArguments(
        "out",
        torch_compile=True,
        torch_compile_mode="reduce-overhead",
        ddp_find_unused_parameters=True,
        gradient_checkpointing=True,
        dataloader_pin_memory=False,
        data_seed=5,
        save_total_limit=3,
    )
    settings = accelerator_settings(args, TinyLM())
    assert (settings["dynamo_plugin"].backend, settings["dynamo_plugin"].mode) == (
        "inductor",
        "reduce-overhead",
    )
    assert settings["kwargs_handlers"][0].find_unused_parameters is True
    assert settings["recompute"] == ("Block",)
    assert (
        settings["dataloader_config"].pin_memory,
        settings["dataloader_config"].data_seed,
    ) == (False, 5)
    assert settings["project_config"].total_limit == 3
    with pytest.raises(ConfigError, match="no repeated block"):
        accelerator_settings(
            TrainingArguments("out", gradient_checkpointing=True), nn.Linear(2, 2)
        )


@pytest.mark.parametrize("epochs", [0.5, 1, 2.25, 3])
@pytest.mark.parametrize("batches", [1, 7, 10])
@pytest.mark.parametrize("window", [1, 3, 4])
def test_the_plan_counts_updates(epochs: float, batches: int, window: int) -> None:
    plan = plan_training(
        TrainingArguments("out", num_train_epochs=epochs), batches, window
    )
    per_epoch = len(range(0, batches, window))
    assert plan.max_steps - 1 < epochs * per_epoch <= plan.max_steps
    assert (
        (plan.num_epochs - 1) * per_epoch
        < plan.max_steps
        <= plan.num_epochs * per_epoch
    )


def test_streams_need_max_steps_and_parts_of_the_whole_become_steps() -> None:
    with pytest.raises(ConfigError, match="set max_steps"):
        plan_training(TrainingArguments("out"), None, 1)
    with pytest.raises(ConfigError, match="no batch"):
        plan_training(TrainingArguments("out"), 0, 1)
    plan = plan_training(
        TrainingArguments(
            "out",
            max_steps=40,
            logging_steps=0.1,
            eval_strategy="steps",
            eval_steps=0.5,
        ),
        None,
        1,
    )
    assert (plan.max_steps, plan.logging_steps, plan.eval_steps, plan.save_steps) == (
        40,
        4,
        20,
        500,
    )
