"""Quantization with bitsandbytes: settings, loading from files, and what is refused."""

from __future__ import annotations

from importlib import util
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from accelerate import init_empty_weights
from accelerate.utils import (
    BnbQuantizationConfig,
    has_4bit_bnb_layers,
    load_and_quantize_model,
)
from accelerate.utils.bnb import get_keys_to_not_convert

pytestmark = pytest.mark.filterwarnings("ignore")
# Any in this file: settings by keyword.


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
        self.norm = nn.LayerNorm(64)
        self.head = nn.Linear(64, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.as_tensor(self.head(self.norm(self.layers(x))))


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({}, "can't be both False"),
        ({"load_in_4bit": True, "load_in_8bit": True}, "can't be both True"),
        ({"load_in_8bit": "yes"}, "must be a boolean"),
        (
            {"load_in_4bit": True, "bnb_4bit_quant_type": "int3"},
            r"must be in \['fp4','nf4'\] but found int3",
        ),
        (
            {"load_in_4bit": True, "bnb_4bit_compute_dtype": "fp7"},
            "bnb_4bit_compute_dtype must be",
        ),
        ({"load_in_8bit": True, "skip_modules": "head"}, "must be a list of strings"),
    ],
)
def test_wrong_settings_are_refused_as_by_the_original(
    wrong: dict[str, Any], says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        BnbQuantizationConfig(**wrong)


def test_dtypes_follow_each_other_as_in_the_original() -> None:
    four = BnbQuantizationConfig(load_in_4bit=True, bnb_4bit_compute_dtype="bf16")
    assert (four.bnb_4bit_compute_dtype, four.torch_dtype) == (
        torch.bfloat16,
        torch.bfloat16,
    )
    assert BnbQuantizationConfig(load_in_8bit=True).torch_dtype is torch.float16


def test_heads_and_tied_weights_keep_their_precision() -> None:
    assert get_keys_to_not_convert(Net()) == ["head"]
    tied = Net()
    tied.layers[2].weight = tied.layers[0].weight
    assert sorted(get_keys_to_not_convert(tied)) == ["head", "layers.0", "layers.2"]


@pytest.mark.parametrize("empty", [True, False])
@pytest.mark.parametrize(
    "settings",
    [{"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, {"load_in_8bit": True}],
)
def test_models_are_quantized_from_files_or_from_memory(
    settings: dict[str, Any], empty: bool, tmp_path: Path
) -> None:
    pytest.importorskip("bitsandbytes")
    torch.manual_seed(0)
    reference, x = Net(), torch.randn(4, 64)
    save_file(reference.state_dict(), tmp_path / "model.safetensors")
    if empty:
        with init_empty_weights():
            model = Net()
    else:
        model = Net()
        model.load_state_dict(reference.state_dict())
    config = BnbQuantizationConfig(
        bnb_4bit_compute_dtype="fp32", torch_dtype="fp32", **settings
    )
    if empty:
        with pytest.raises(RuntimeError, match="weights_location"):
            load_and_quantize_model(model, config, device_map={"": "cpu"})
    quantized = load_and_quantize_model(
        model, config, tmp_path if empty else None, device_map={"": "cpu"}
    )
    assert has_4bit_bnb_layers(quantized) == ("load_in_4bit" in settings)
    assert type(quantized.get_submodule("head")) is nn.Linear
    assert type(quantized.get_submodule("layers.0")) is not nn.Linear
    with torch.no_grad():
        assert (quantized(x) - reference(x)).abs().mean() < 0.1
    with pytest.raises(ValueError, match="cannot be offloaded"):
        load_and_quantize_model(
            Net(), config, device_map={"layers": "cpu", "norm": "disk", "head": "disk"}
        )


def test_without_the_package_it_is_said_what_to_install() -> None:
    if util.find_spec("bitsandbytes"):
        pytest.skip("bitsandbytes is installed")
    with pytest.raises(ImportError, match="pip install 'bitsandbytes"):
        load_and_quantize_model(Net(), BnbQuantizationConfig(load_in_8bit=True))
