"""TPU jobs as users start them, on XLA's CPU devices: `hasten launch`, a notebook's cell, `hasten env`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hasten import notebook_launcher
from hasten.extensions.xla.placing import Devices

# each starts processes that load torch and torch_xla and compile
pytestmark = pytest.mark.timeout(400)

ROOT = Path(__file__).parents[2]
SCRIPT = """
import torch
from hasten import Accelerator
accelerator = Accelerator(mixed_precision="bf16")
model = torch.nn.Linear(4, 1)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
loss = model(torch.ones(8, 4, device=accelerator.device)).square().mean()
accelerator.backward(loss)
optimizer.step()
print("trained", accelerator.strategy, accelerator.device, accelerator.num_processes, loss.item() > 0)
"""


ACCELERATE = """
import torch
from accelerate import Accelerator
from accelerate.utils import is_torch_xla_available, set_seed
from torch.utils.data import DataLoader, TensorDataset
set_seed(0)
accelerator = Accelerator()
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(torch.arange(96.0).reshape(24, 4) / 96), batch_size=4)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for (rows,) in loader:
    with accelerator.accumulate(model):
        loss = model(rows).square().mean()
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
accelerator.save_state("run")
accelerator.load_state("run")
print("trained", accelerator.device, accelerator.distributed_type.value, is_torch_xla_available(), f"{loss.item():.6f}")
"""


def hasten(*words: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run the command."""
    command = [sys.executable, "-m", "hasten.cli.main", *words]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=380, check=False, cwd=cwd
    )


@pytest.mark.parametrize("flag", ["--tpu", "--strategy=xla"])
def test_launch(flag: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    done = hasten("launch", flag, "train.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "trained xla xla:0 1 True" in done.stdout


def test_scripts_for_accelerate(tmp_path: Path) -> None:
    """Through the drop-in, by its own launcher: the same numbers as on the CPU, and the established names of what it runs on."""
    (tmp_path / "train.py").write_text(ACCELERATE)
    path = os.pathsep.join([str(ROOT / "dropin" / "src"), str(ROOT / "src")])
    words_by_flag = {}
    for flag in ("--tpu", "--cpu"):
        command = [sys.executable, "-m", "accelerate.commands.launch", flag, "train.py"]
        variables = {**os.environ, "PYTHONPATH": path}
        if flag == "--cpu":
            variables |= {"USE_TORCH_XLA": "0"}
        done = subprocess.run(
            command,
            env=variables,
            capture_output=True,
            text=True,
            timeout=380,
            check=False,
            cwd=tmp_path,
        )
        assert done.returncode == 0, done.stderr
        words_by_flag[flag] = done.stdout.split()
    assert words_by_flag["--tpu"][:-1] == ["trained", "xla:0", "XLA", "True"]
    assert words_by_flag["--cpu"][:-1] == ["trained", "cpu", "NO", "False"]
    assert float(words_by_flag["--tpu"][-1]) == pytest.approx(
        float(words_by_flag["--cpu"][-1]), abs=2e-6
    )


def test_several_processes_are_refused(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    done = hasten("launch", "--tpu", "--num_processes", "2", "train.py", cwd=tmp_path)
    assert done.returncode == 2
    assert "one process controls all devices" in done.stderr


def test_a_cell_of_a_notebook(tmp_path: Path) -> None:
    (tmp_path / "tpu.yaml").write_text("strategy: xla\n")

    def train(rows: int) -> list[object]:
        import torch

        from hasten import Accelerator

        accelerator = Accelerator()
        return [
            accelerator.strategy,
            torch.ones(rows, device=accelerator.device).sum().item(),
        ]

    assert notebook_launcher(train, (6,), config_file=str(tmp_path / "tpu.yaml")) == [
        "xla",
        6.0,
    ]


def test_env() -> None:
    assert json.loads(hasten("env", "--json").stdout)["packages"][
        "torch_xla"
    ].startswith("2.9")


def test_a_backward_before_the_accelerator_is_told() -> None:
    code = """
import torch
from hasten import Accelerator
torch.ones(1, requires_grad=True).sum().backward()
try:
    Accelerator(strategy="xla")
except Exception as error:
    print(type(error).__name__, error)
else:
    print("fine")
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=380,
        check=False,
    )
    assert done.stdout.startswith(
        "DeviceError backward() ran on the CPU before XLA was started"
    ), done.stdout + done.stderr


def test_the_number_of_devices_is_the_one_asked_for() -> None:
    """`make test-xla` runs this folder with one device and with four."""
    assert Devices.all().count in (1, 4)
