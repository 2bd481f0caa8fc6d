"""DeepSpeed through the established names: settings as the original reads them, and training that equals training without."""

from __future__ import annotations

import base64
import json
from math import inf
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator, DeepSpeedPlugin, DistributedType
from accelerate.state import AcceleratorState
from accelerate.utils import DummyOptim, DummyScheduler, HfDeepSpeedConfig
from accelerate.utils.deepspeed import (
    DeepSpeedOptimizerWrapper,
    get_active_deepspeed_plugin,
)
from hasten.optional import available

TESTS_FOLDER = Path(__file__).parent
needs_deepspeed = pytest.mark.skipif(
    not available("deepspeed"), reason="needs deepspeed"
)


pytestmark = pytest.mark.usefixtures("fresh_states")


def test_single_options_make_the_configuration_the_original_makes() -> None:
    plugin = DeepSpeedPlugin(
        zero_stage=3, gradient_clipping=1.0, offload_optimizer_device="cpu"
    )
    assert plugin.deepspeed_config == {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "cpu", "nvme_path": None},
            "offload_param": {"device": "none", "nvme_path": None},
            "stage3_gather_16bit_weights_on_model_save": False,
        },
        "gradient_clipping": 1.0,
        "steps_per_print": inf,
    }
    plain = DeepSpeedPlugin()
    assert (
        plain.zero_stage,
        plain.gradient_accumulation_steps,
        plain.gradient_clipping,
    ) == (2, "auto", "auto")
    assert (plugin.zero3_init_flag, plain.zero3_init_flag) == (True, False)


@needs_deepspeed
def test_blocks_that_are_gathered_together_can_be_marked_by_hand(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, marked = nn.Sequential(nn.Linear(1, 1), nn.ReLU()), []
    monkeypatch.setattr(
        "deepspeed.utils.set_z3_leaf_modules",
        lambda *arguments: marked.append(arguments),
    )
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES", "ReLU")
    DeepSpeedPlugin(transformer_moe_cls_names="Linear,ReLU").set_moe_leaf_modules(model)
    plugin = DeepSpeedPlugin()
    plugin.set_moe_leaf_modules(model)
    assert (
        marked == [(model, [nn.Linear, nn.ReLU]), (model, [nn.ReLU])]
        and plugin.transformer_moe_cls_names == "ReLU"
    )


def test_a_configuration_wins_over_options(tmp_path: Path) -> None:
    config = {"zero_optimization": {"stage": 1}, "gradient_clipping": 0.5}
    file = tmp_path / "engine.json"
    file.write_text(json.dumps(config))
    for engine_config in (config, str(file), HfDeepSpeedConfig(config)):
        plugin = DeepSpeedPlugin(hf_ds_config=engine_config)
        assert (plugin.zero_stage, plugin.gradient_clipping) == (1, 0.5)
    with pytest.raises(ValueError, match="specify the ZeRO optimization config"):
        DeepSpeedPlugin(hf_ds_config={"gradient_clipping": 1.0})


def test_questions_about_a_configuration() -> None:
    config = HfDeepSpeedConfig(
        {
            "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}},
            "fp16": {"enabled": True},
        }
    )
    assert (config.is_zero2(), config.is_zero3(), config.is_offload()) == (
        False,
        True,
        True,
    )
    assert config.get_value("fp16.enabled") is True
    assert config.get_value("x.y") is None
    assert (
        config.is_true("fp16.enabled"),
        config.is_false("fp16.enabled"),
        config.is_false("nope"),
    ) == (
        True,
        False,
        False,
    )
    assert config.find_config_node("fp16.enabled") == ({"enabled": True}, "enabled")
    with pytest.raises(ValueError, match="mismatch"):
        DeepSpeedPlugin(
            hf_ds_config={"zero_optimization": {"stage": 2}, "gradient_clipping": 1.0}
        ).deepspeed_config_process(gradient_clipping=2.0)


def test_plugins_by_name_are_selected() -> None:
    plugins = {
        "student": DeepSpeedPlugin(zero_stage=2),
        "teacher": DeepSpeedPlugin(zero_stage=1),
    }
    state = AcceleratorState
    accelerator = Accelerator(cpu=True, deepspeed_plugins=plugins)
    assert accelerator.deepspeed_plugin is plugins["student"]
    state().select_deepspeed_plugin("teacher")
    assert get_active_deepspeed_plugin(accelerator.state) is plugins["teacher"]
    with pytest.raises(ValueError, match="no DeepSpeed plugin named"):
        state().get_deepspeed_plugin("nobody")


def _train(accelerator: Accelerator, dummies: bool = False) -> list[float]:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer: Any = (
        DummyOptim(model.parameters(), lr=0.1)
        if dummies
        else torch.optim.AdamW(model.parameters(), lr=0.1)
    )
    data = torch.randn(16, 4, generator=torch.Generator().manual_seed(1))
    loader: Any = DataLoader(TensorDataset(data), batch_size=2)
    things = [model, optimizer, loader]
    if dummies:
        things.append(DummyScheduler(optimizer, warmup_num_steps=2, total_num_steps=8))
    model, optimizer, loader = accelerator.prepare(*things)[:3]
    losses = []
    for (x,) in loader:
        with accelerator.accumulate(model):
            loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    assert isinstance(optimizer, DeepSpeedOptimizerWrapper) == (
        accelerator.distributed_type == DistributedType.DEEPSPEED
    )
    return losses


@needs_deepspeed
def test_a_loop_trains_as_without_an_engine() -> None:
    plain = _train(Accelerator(cpu=True, gradient_accumulation_steps=2))
    AcceleratorState._reset_state(True)
    config = {"zero_optimization": {"stage": 2}, "gradient_accumulation_steps": 2}
    accelerator = Accelerator(
        cpu=True, deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config)
    )
    assert accelerator.gradient_accumulation_steps == 2
    assert _train(accelerator) == pytest.approx(plain, abs=1e-6)


@needs_deepspeed
def test_stand_ins_become_what_the_configuration_says() -> None:
    config = {
        "zero_optimization": {"stage": 1},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": 0.01}},
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_num_steps": "auto", "warmup_max_lr": "auto"},
        },
    }
    losses = _train(
        Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config)),
        dummies=True,
    )
    assert len(losses) == 8


def test_counts_of_micro_steps_that_differ_are_refused() -> None:
    plugin = DeepSpeedPlugin(gradient_accumulation_steps=4)
    with pytest.raises(ValueError, match="4 in the DeepSpeed"):
        Accelerator(cpu=True, gradient_accumulation_steps=2, deepspeed_plugin=plugin)


@needs_deepspeed
@pytest.mark.exhaustive
@pytest.mark.timeout(300)
@pytest.mark.parametrize("processes", [1, 2])
def test_trainer_has_the_same_losses_with_an_engine_and_after_a_resume(
    tmp_path: Path, warm: Any, parity: ModuleType, processes: int
) -> None:
    pytest.importorskip("transformers")
    out = tmp_path / "out.json"
    done = warm.run(
        tmp_path,
        [str(TESTS_FOLDER / "clients" / "engine.py"), str(tmp_path / "run"), str(out)],
        processes,
    )
    assert not done.failed, done.err
    logs_by_name = json.loads(out.read_text())
    for name, logs in logs_by_name.items():
        assert (
            parity.differences(logs["whole"], logs["resumed"], tolerance=1e-6) == []
        ), f"{name}, resumed"
        assert len(logs["whole"]) == len(logs_by_name["without"]["whole"])
    for name in ("own", "partitioned"):
        assert (
            parity.differences(
                logs_by_name["without"]["whole"],
                logs_by_name[name]["whole"],
                tolerance=1e-5,
            )
            == []
        ), name


def test_a_configuration_is_completed_and_checked_as_the_original_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config: dict[str, Any] = {
        "zero_optimization": {"stage": 3},
        "gradient_accumulation_steps": "auto",
    }
    text = base64.urlsafe_b64encode(
        json.dumps({**config, "padding": "x" * 5000}).encode()
    ).decode()
    assert (
        DeepSpeedPlugin(
            hf_ds_config=text, gradient_accumulation_steps=8
        ).deepspeed_config.items()
        >= {
            # as given where the configuration leaves it to the run
            "gradient_accumulation_steps": 8,
            "steps_per_print": inf,
        }.items()
    )
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none")
    monkeypatch.setenv("ACCELERATE_GRADIENT_CLIPPING", "2")
    with pytest.warns(UserWarning, match="only applicable for ZeRO Stage 3"):
        plugin = DeepSpeedPlugin(zero3_init_flag=True)
    assert (plugin.zero3_init_flag, repr(plugin.gradient_clipping)) == (False, "2.0")
    plugin.set_mixed_precision("fp16")
    assert plugin.deepspeed_config["fp16"] == {"enabled": True, "auto_cast": True}
    assert plugin.deepspeed_config["bf16"] == {"enabled": False}
    with pytest.raises(ValueError, match="cannot be set to `bf16` when `fp16` is set"):
        plugin.set_mixed_precision("bf16")
    monkeypatch.setenv("ACCELERATE_CONFIG_DS_FIELDS", "zero_stage,main_process_ip")
    with pytest.raises(
        ValueError, match="the following accelerate config variables will be ignored"
    ):
        DeepSpeedPlugin(hf_ds_config=config)
