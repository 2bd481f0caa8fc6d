"""Keys of DeepSpeed's configuration that DeepSpeed does not know are refused with the nearest one it knows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from torch import nn

from hasten import Accelerator
from hasten.errors import ConfigError
from hasten.optional import available
from hasten.runtime.context import ProcessContext
from hasten.strategies.engines.deepspeed.engine import VERSIONS
from hasten.strategies.engines.deepspeed.keys import check
from hasten.testing.pool import ranks

PRELOAD: Final = ("deepspeed",)

UNKNOWN: tuple[tuple[dict[str, Any], str], ...] = (
    ({"zero_optimisation": {"stage": 2}}, r"'zero_optimisation' at the top level.* did you mean 'zero_optimization'\?"),
    ({"train_batchsize": 8}, r"'train_batchsize' at the top level.* did you mean 'train_batch_size'\?"),
    (
        {"activation_checkpointing": {"partition_activation": True}},
        r"'partition_activation' at section 'activation_checkpointing'.* did you mean 'partition_activations'\?",
    ),
    ({"optimizer": {"typ": "Adam"}}, r"'typ' at section 'optimizer'.* did you mean 'type'\?"),
)
IN_SECTIONS: tuple[tuple[dict[str, Any], str], ...] = (
    (
        {"zero_optimization": {"stage": 2, "overlap_com": True}},
        r"'overlap_com' at section 'zero_optimization'.* did you mean 'overlap_comm'\?",
    ),
    (
        {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu", "pin_memmory": True}}},
        r"'pin_memmory' at section 'zero_optimization.offload_param'.* did you mean 'pin_memory'\?",
    ),
    ({"fp16": {"enabled": False, "loss_scal": 0}}, r"'loss_scal' at section 'fp16'.* did you mean 'loss_scale'\?"),
    (
        {"zero_optimization": {"stage": 2, "reduce_bucket_size": "many"}},
        r"reduce_bucket_size='many', which its DeepSpeedZeroConfig refuses",
    ),
)


@pytest.mark.parametrize(("config", "message"), UNKNOWN)
def test_unknown_keys_are_refused_without_deepspeed(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check(config, "deepspeed.hf_ds_config='ds.json'")


def test_known_keys_and_comments_pass() -> None:
    check(
        {"_why": "a comment", "//": "another", "zero_optimization": {"stage": 1}, "wandb": {"enabled": False}},
        "deepspeed.hf_ds_config",
    )


@ranks(2)
@pytest.mark.timeout(300)  # the first of these tests imports deepspeed
@pytest.mark.skipif(not available("deepspeed", VERSIONS), reason=f"deepspeed{VERSIONS} is not installed")
def test_unknown_keys_in_a_file_are_refused_before_an_engine_starts(ctx: ProcessContext, tmp_path: Path) -> None:
    for number, (config, message) in enumerate((*UNKNOWN, *IN_SECTIONS)):
        path = tmp_path / f"{ctx.world.rank}-{number}.json"
        path.write_text(json.dumps(config))
        net = nn.Linear(4, 4)
        accelerator = Accelerator(strategy="deepspeed", deepspeed_plugin={"hf_ds_config": str(path)})
        with pytest.raises(ConfigError, match=message) as raised:
            accelerator.prepare(net, torch.optim.AdamW(net.parameters()))
        assert path.name in str(raised.value) or "hf_ds_config" in str(raised.value)
