"""What clients ask of the distribution before they train, and what its commands say of themselves."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

import pytest
import torch
from torch import nn

from accelerate import Accelerator
from accelerate.commands import launch
from accelerate.commands.to_fsdp2 import convert_config_to_fsdp2
from hasten.errors import ConfigError

ROOT = Path(__file__).parents[2]


pytestmark = pytest.mark.usefixtures("fresh_states")


def test_the_home_page_is_a_page_of_the_documentation() -> None:
    page = metadata.metadata("accelerate")["Home-page"]
    assert "huggingface" in page
    assert "Hugging Face Accelerate" in (ROOT / page).read_text().splitlines()[0]


def test_sentence_transformers_finds_what_it_needs_for_training() -> None:
    environment = pytest.importorskip("sentence_transformers.util.environment")
    assert environment.is_accelerate_available()


def test_fp16_on_the_cpu_is_fp16() -> None:
    accelerator = Accelerator(mixed_precision="fp16", cpu=True)
    model = accelerator.prepare(nn.Linear(2, 2))
    assert accelerator.scaler is not None
    with accelerator.autocast():
        assert (
            nn.functional.linear(torch.ones(1, 2), model.weight).dtype == torch.float16
        )


@pytest.mark.parametrize(
    ("number", "name", "reshard"),
    [
        (1, "FULL_SHARD", True),
        (2, "SHARD_GRAD_OP", False),
        (4, "HYBRID_SHARD", True),
        (5, "HYBRID_SHARD_ZERO2", False),
    ],
)
def test_numbers_of_sharding_strategies_mean_their_names(
    number: int, name: str, reshard: bool
) -> None:
    for value in (number, str(number), name):
        converted = convert_config_to_fsdp2(
            {
                "distributed_type": "FSDP",
                "fsdp_config": {"fsdp_sharding_strategy": value},
            }
        )
        assert converted["fsdp_config"] == {
            "fsdp_reshard_after_forward": reshard,
            "fsdp_version": 2,
        }


@pytest.mark.parametrize("value", [3, "NO_SHARD"])
def test_a_strategy_that_shards_nothing_is_refused(value: object) -> None:
    with pytest.raises(ConfigError, match="use DDP"):
        convert_config_to_fsdp2({"fsdp_config": {"fsdp_sharding_strategy": value}})


@pytest.mark.parametrize(
    "words", [["--help"], ["--nothing", "train.py"], [], ["nowhere.py"]]
)
def test_launch_names_the_command_that_was_typed(
    words: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    try:
        code = launch.run(words)
    except SystemExit as end:
        code = int(end.code or 0)
    printed = "".join(capfd.readouterr())
    assert code == (0 if words == ["--help"] else 2)
    assert "accelerate launch" in printed
    assert "hasten launch" not in printed
