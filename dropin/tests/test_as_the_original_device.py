"""What a comparison on a GPU has shown, checked where the CPU shows it as well."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from accelerate import Accelerator
from accelerate._impl.views.state import _shown_device, fill_whole
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import GradScalerKwargs, TorchDynamoPlugin


@pytest.fixture(autouse=True)
def _alone() -> Any:
    AcceleratorState._reset_state(True)
    yield
    AcceleratorState._reset_state(True)


def test_a_scale_shows_what_the_latest_step_did() -> None:
    accelerator = Accelerator(
        cpu=True,
        mixed_precision="fp16",
        kwargs_handlers=[GradScalerKwargs(init_scale=1024.0)],
        gradient_accumulation_steps=2,
    )
    layer = nn.Linear(2, 1)
    model, optimizer = accelerator.prepare(
        layer, torch.optim.SGD(layer.parameters(), lr=0.1)
    )
    skips_and_scales = []
    for factor in (1.0, float("inf"), 1.0, 1.0):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(1, 2)).sum() * factor)
            optimizer.step()
            optimizer.zero_grad()
            skips_and_scales.append(
                (accelerator.optimizer_step_was_skipped, accelerator.scaler.get_scale())
            )
    assert skips_and_scales == [
        (False, 1024.0),
        (True, 512.0),
        (True, 512.0),
        (False, 512.0),
    ]
    assert isinstance(accelerator.scaler, torch.amp.GradScaler)


def test_half_weights_are_taken_and_their_training_is_an_error() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="fp16")
    layer = nn.Linear(2, 1).half()
    model, optimizer = accelerator.prepare(
        layer, torch.optim.SGD(layer.parameters(), lr=0.1)
    )
    assert model(torch.ones(1, 2).half()).dtype == torch.float32
    accelerator.backward(model(torch.ones(1, 2).half()).sum())
    for use in (
        lambda: accelerator.clip_grad_norm_(model.parameters(), 1.0),
        optimizer.step,
    ):
        with pytest.raises(ValueError, match=r"Attempting to unscale FP16 gradients\."):
            use()


def test_the_device_of_a_lone_process_has_no_index(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first, second = torch.device("cuda", 0), torch.device("cuda", 1)
    assert (_shown_device(first), _shown_device(second)) == (
        torch.device("cuda"),
        second,
    )
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert _shown_device(first) == first
    monkeypatch.delenv("LOCAL_RANK")
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", "cuda:0")
    assert _shown_device(first) == first
    monkeypatch.delenv("ACCELERATE_TORCH_DEVICE")
    accelerator = Accelerator(cpu=True)
    accelerator.state.device = first
    assert accelerator.device == first


@pytest.mark.parametrize(
    ("backend", "precision"), [("eager", "no"), ("eager", "bf16"), ("no", "no")]
)
def test_compiled_models_multiply_in_tf32(backend: str, precision: str) -> None:
    initial_setting, settings = (
        torch.backends.cuda.matmul.allow_tf32,
        torch.backends.cuda.matmul,
    )
    settings.allow_tf32 = False
    try:
        PartialState(cpu=True).device = torch.device("cuda")
        fill_whole(precision, dynamo_plugin=TorchDynamoPlugin(backend=backend))
        assert settings.allow_tf32 is ((backend, precision) == ("eager", "no"))
    finally:
        settings.allow_tf32 = initial_setting
