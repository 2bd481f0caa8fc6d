"""Golden DeepSpeed configurations: what settings and facts of a run lead to, key by key and note by note.

Run this file as a program to accept the present ones into golden_configs/.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import pytest

from hasten.errors import ConfigError
from hasten.extensions.deepspeed.config import RunFacts, make_engine_config
from hasten.extensions.deepspeed.settings import DeepSpeedPlugin

FOLDER: Final = Path(__file__).with_name("golden_configs")

HUB: Final[dict[str, Any]] = {  # the shape transformers' documentation gives
    "fp16": {"enabled": "auto", "loss_scale": 0, "initial_scale_power": 16},
    "bf16": {"enabled": "auto"},
    "optimizer": {
        "type": "AdamW",
        "params": {
            "lr": "auto",
            "betas": "auto",
            "eps": "auto",
            "weight_decay": "auto",
        },
    },
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {
            "warmup_min_lr": "auto",
            "warmup_max_lr": "auto",
            "warmup_num_steps": "auto",
            "total_num_steps": "auto",
        },
    },
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "overlap_comm": True,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
}
NVME: Final = {"device": "nvme", "nvme_path": "/drive"}
DUMMY: Final = {"lr": 5e-5, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01}

CASES: Final = MappingProxyType(
    {
        "defaults": (DeepSpeedPlugin(), RunFacts()),
        "bf16_accumulated": (
            DeepSpeedPlugin(zero_stage=1, gradient_clipping=1.0),
            RunFacts(
                mixed_precision="bf16", accumulation=4, world_size=8, micro_batch=16
            ),
        ),
        "stage_3_offloaded": (
            DeepSpeedPlugin(
                zero_stage=3,
                offload_optimizer_device="cpu",
                offload_param_device="cpu",
                zero3_save_16bit_model=True,
            ),
            RunFacts(mixed_precision="fp16", world_size=2),
        ),
        "hub_file": (
            DeepSpeedPlugin(hf_ds_config=HUB),
            RunFacts(
                mixed_precision="bf16",
                accumulation=2,
                world_size=4,
                micro_batch=8,
                hidden_size=768,
                optimizer=DUMMY,
                scheduler={"total_num_steps": 1000, "warmup_num_steps": 100},
            ),
        ),
        "no_hidden_size_no_loader": (
            DeepSpeedPlugin(
                hf_ds_config={
                    "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"},
                    "train_batch_size": "auto",
                    "train_micro_batch_size_per_gpu": "auto",
                }
            ),
            RunFacts(world_size=2),
        ),
        "total_batch_given": (
            DeepSpeedPlugin(
                hf_ds_config={
                    "train_batch_size": 64,
                    "zero_optimization": {"stage": 1, "overlap_comm": True},
                }
            ),
            RunFacts(accumulation=2, world_size=4),
        ),
    }
)


def text(name: str) -> str:
    plugin, facts = CASES[name]
    translated = make_engine_config(plugin, facts)
    shown = {
        "stage": translated.stage,
        "clipping": translated.clipping,
        "config": translated.config,
        "notes": list(translated.notes),
    }
    return json.dumps(shown, indent=1, sort_keys=True) + "\n"


@pytest.mark.parametrize("name", CASES)
def test_the_configuration_is_the_accepted_one(name: str) -> None:
    assert text(name) == (FOLDER / f"{name}.json").read_text()


def test_every_accepted_file_has_a_case_and_no_auto() -> None:
    assert {file.stem for file in FOLDER.iterdir()} == set(CASES)
    for name in CASES:
        assert '"auto"' not in json.dumps(json.loads(text(name))["config"])


def test_the_given_mapping_is_left_as_it_was() -> None:
    initial_text = json.dumps(HUB)
    text("hub_file")
    assert json.dumps(HUB) == initial_text


@pytest.mark.parametrize(
    ("engine_config", "facts", "words"),
    [
        (
            {"gradient_accumulation_steps": 4},
            RunFacts(accumulation=2),
            "=4 and the loop's gradient_accumulation_steps=2 differ",
        ),
        ({"bf16": {"enabled": True}}, RunFacts(), "Set mixed_precision='bf16'"),
        (
            {"fp16": {"enabled": False}},
            RunFacts(mixed_precision="fp16"),
            "Set mixed_precision='no'",
        ),
        ({"train_batch_size": 10}, RunFacts(world_size=4), "Set a multiple of 4"),
        (
            {"train_batch_size": 10, "train_micro_batch_size_per_gpu": 4},
            RunFacts(),
            'Write "auto" for one of them',
        ),
        ({"zero_optimization": {"stage": 4}}, RunFacts(), "Set 0, 1, 2 or 3"),
        (
            {"zero_optimization": {"stage": 0, "offload_optimizer": {"device": "cpu"}}},
            RunFacts(),
            "needs stage 1, 2 or 3",
        ),
        (
            {"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}},
            RunFacts(),
            "needs stage 3",
        ),
        (
            {"zero_optimization": {"stage": 3, "offload_param": NVME}},
            RunFacts(),
            "Use device='cpu'",
        ),
        (
            {"zero_optimization": {"stage": 3, "offload_optimizer": NVME}},
            RunFacts(),
            "Use device='cpu'",
        ),
        ({"zero_optimization": 3}, RunFacts(), "Write zero_optimization as a mapping"),
        ({"optimizer": {"type": "AdamW"}}, RunFacts(), "one of them would be ignored"),
        ({}, RunFacts(optimizer={"lr": 1.0}), "no optimizer section"),
        (
            {"optimizer": {"params": {"eps": "auto"}}},
            RunFacts(optimizer={"lr": 1.0}),
            "DummyOptim was not given eps",
        ),
        (
            {"scheduler": {"params": {"total_num_steps": "auto"}}},
            RunFacts(),
            "DummyScheduler",
        ),
        (
            {"comms_logger": {"enabled": "auto"}},
            RunFacts(),
            'says "auto" for comms_logger.enabled',
        ),
        ({"torch_autocast": {"enabled": True}}, RunFacts(), "Remove torch_autocast"),
        ({}, RunFacts(mixed_precision="fp8"), "use 'bf16'"),
    ],
)
def test_contradictions_name_both_sides(
    engine_config: dict[str, Any], facts: RunFacts, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        make_engine_config(DeepSpeedPlugin(hf_ds_config=engine_config), facts)


def test_sections_that_are_one_mapping_are_filled_in_apart() -> None:
    offload_device = {"device": "cpu"}
    shared = {
        "zero_optimization": {
            "stage": 3,
            "offload_param": offload_device,
            "offload_optimizer": offload_device,
        }
    }
    separate = json.loads(json.dumps(shared))
    translated, expected = (
        make_engine_config(DeepSpeedPlugin(hf_ds_config=config), RunFacts())
        for config in (shared, separate)
    )
    assert translated == expected
    sections = translated.config["zero_optimization"]
    assert sections["offload_param"] is not sections["offload_optimizer"]
    assert offload_device == {"device": "cpu"}


def test_files_are_read_and_explained(tmp_path: Path) -> None:
    good, bad, list_file = (
        tmp_path / "good.json",
        tmp_path / "bad.json",
        tmp_path / "list.json",
    )
    good.write_text(json.dumps({"zero_optimization": {"stage": 1}}))
    bad.write_text("{")
    list_file.write_text("[]")
    assert (
        make_engine_config(DeepSpeedPlugin(hf_ds_config=str(good)), RunFacts()).stage
        == 1
    )
    for path, words in (
        (bad, "cannot be read"),
        (list_file, "not a JSON object"),
        (tmp_path / "none.json", "cannot be read"),
    ):
        with pytest.raises(ConfigError, match=words):
            make_engine_config(DeepSpeedPlugin(hf_ds_config=str(path)), RunFacts())


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name in CASES:
        (FOLDER / f"{name}.json").write_text(text(name))
