"""Checks of `merge_fsdp_weights` and of `accelerate merge-weights` on a sharded model."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from accelerate._impl.accelerator.facade import Accelerator
from accelerate._impl.checkpoints.fsdp import save_fsdp_model
from accelerate._impl.checkpoints.merge import merge_fsdp_weights
from accelerate._impl.settings.fsdp_plugin import FullyShardedDataParallelPlugin
from accelerate._impl.testing.cases import torch_device as torch_device

# Any in this file: what `prepare` returns, and state dictionaries.


class TinyModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear1 = nn.Linear(16, 16)
        self.activation = nn.ReLU()
        self.linear2 = nn.Linear(16, 16)
        self.softmax = nn.Softmax(dim=-1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.softmax(self.linear2(self.activation(self.linear1(x))))
        return out


def setup() -> tuple[Any, Any, Any]:
    plugin = FullyShardedDataParallelPlugin(state_dict_type="SHARDED_STATE_DICT")
    accelerator = Accelerator(fsdp_plugin=plugin)
    return accelerator.prepare(TinyModel()), plugin, accelerator


def mock_training(accelerator: Any, model: Any) -> Any:
    optimizer = accelerator.prepare(torch.optim.Adam(model.parameters(), lr=0.01))
    for _ in range(3):
        accelerator.backward(
            model(torch.rand(2, 16, device=accelerator.device)).pow(2).sum()
        )
        optimizer.step()
        optimizer.zero_grad()
    return model


def check_weights(
    operation: str, state_1: dict[str, Tensor], state_2: dict[str, Tensor]
) -> None:
    """Raise unless two state dictionaries are the `same`, or `diff`erent, as `operation` says."""
    are_equal = all(
        torch.allclose(weight.cpu(), state_2[weight_name].cpu())
        for weight_name, weight in state_1.items()
    )
    assert are_equal == (operation == "same"), f"weights should be {operation}"


def check_safetensors_weights(path: str, model: Any) -> None:
    check_weights("same", load_file(Path(path, "model.safetensors")), model)


def check_pytorch_weights(path: str, model: Any) -> None:
    """Raise unless the merged file of torch has the model's weights."""
    check_weights(
        "same", torch.load(Path(path, "pytorch_model.bin"), weights_only=True), model
    )


def _by_command(folder: str, path: str, safe_serialization: bool) -> None:
    command = [
        sys.executable,
        "-m",
        "accelerate.commands.accelerate_cli",
        "merge-weights",
    ]
    if safe_serialization:
        flags = []
    else:
        flags = ["--unsafe_serialization"]
    subprocess.run([*command, *flags, folder, path], check=True)


def _make_test(
    description: str, merge: Callable[..., None], safe: bool
) -> Callable[[Any, str], None]:
    def check(model: Any, path: str) -> None:
        merge(str(Path(path, "pytorch_model_fsdp_0")), path, safe_serialization=safe)
        (check_safetensors_weights if safe else check_pytorch_weights)(path, model)

    check.__doc__ = description
    return check


test_merge_weights_safetensors = _make_test(
    "Check the merged safetensors file.", merge_fsdp_weights, True
)
test_merge_weights_command_safetensors = _make_test(
    "Check the command's safetensors file.", _by_command, True
)
test_merge_weights_pytorch = _make_test(
    "Check the merged file of torch.", merge_fsdp_weights, False
)
test_merge_weights_command_pytorch = _make_test(
    "Check the command's file of torch.", _by_command, False
)


def main() -> None:
    """Train and save a sharded model, and merge it in every way."""
    model, plugin, accelerator = setup()
    mock_training(accelerator, model)
    weights = accelerator.get_state_dict(model)
    folders = [tempfile.mkdtemp() if accelerator.is_main_process else ""]
    path = accelerator.gather_for_metrics(folders, use_gather_object=True)[0]
    save_fsdp_model(plugin, accelerator, model, path)
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        checks = (
            test_merge_weights_safetensors,
            test_merge_weights_command_safetensors,
        )
        for check in (
            *checks,
            test_merge_weights_pytorch,
            test_merge_weights_command_pytorch,
        ):
            check(weights, path)
            for file in (*Path(path).glob("*.safetensors"), *Path(path).glob("*.bin")):
                file.unlink()
    accelerator.wait_for_everyone()
