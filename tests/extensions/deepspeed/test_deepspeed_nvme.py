"""Optimizer state on NVMe change no number: training, clipping, checkpoints, and parameters that a window does not use."""

from __future__ import annotations

import subprocess
import sys
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from torch import Tensor, nn

from hasten import Accelerator, DistributedDataParallelKwargs
from hasten.errors import PrepareError
from hasten.extensions.deepspeed.engine import VERSIONS
from hasten.extensions.deepspeed.nvme import INSTALL
from hasten.optional import available, need
from hasten.runtime.context import ProcessContext
from hasten.testing.pool import ranks

pytestmark = pytest.mark.skipif(
    not available("deepspeed", VERSIONS),
    reason=f"deepspeed{VERSIONS} is not installed (pip install 'hasten[deepspeed]')",
)

LOAD: Final = """
from deepspeed.accelerator import set_accelerator
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
set_accelerator(CPU_Accelerator())
"""
BUILD: Final = f"""{LOAD}
from hasten.extensions.deepspeed.nvme import build_library
build_library()
"""
TWO_ENGINES: Final = """
import os
import pathlib
import sys
import torch
from hasten import Accelerator
zero = {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": sys.argv[1]}}
accelerator = Accelerator(cpu=True, strategy="deepspeed", deepspeed={"hf_ds_config": {"zero_optimization": zero}})
kept = []
for _ in range(2):
    model = torch.nn.Linear(8, 70001)
    kept.append(accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1)))
folders = list(pathlib.Path(sys.argv[1]).iterdir())
files = [[file for file in folder.rglob("*") if file.is_file()] for folder in folders]
assert len(folders) == 2 and all(files), folders
if os.fork() == 0:
    sys.exit()
os.wait()
assert all(file.exists() for some in files for file in some), "removed by another process"
"""
LOST_READ: Final = f"""{LOAD}
import sys
import torch
from deepspeed.ops.op_builder import AsyncIOBuilder
handle = AsyncIOBuilder().load(verbose=False).aio_handle(1024**2, 8, False, True, 1)
written = handle.new_cpu_locked_tensor(2**19, torch.zeros(1))
written.fill_(1.0)
assert handle.async_pwrite(written, sys.argv[1], 0) == 0 and handle.wait() == 1
room = handle.new_cpu_locked_tensor(2**20, torch.zeros(1))
for start in (0, 128, 64):  # elements of 4 bytes: 0, 512 and 256 bytes
    target = room.zero_().narrow(0, start, 2**19)
    said = handle.async_pread(target, sys.argv[1], 0), handle.wait()
    print(4 * start, said, bool(target.eq(1).all()), bool(target.eq(0).all()))
"""
BARE: Final = f"""{LOAD}
import sys
import deepspeed
import torch
from torch import nn

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
torch.distributed.init_process_group("gloo", init_method="file://" + sys.argv[1] + "/store", rank=0, world_size=1)

class Wide(nn.Module):
    def __init__(self, layers):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(8, 70001, bias=False) for _ in range(layers))
    def forward(self, x, used):
        return sum(layer(x).square().mean() for layer in self.layers[:used])

def trained(place, half, layers, used):
    zero = {{"stage": 3, "sub_group_size": 1, "offload_optimizer": {{"device": "cpu", "pin_memory": False}}}}
    zero["offload_param"] = place | {{"pin_memory": False}}
    config = {{"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero, "bf16": {{"enabled": half}}}}
    config |= {{"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}}
    model = Wide(layers)
    adam = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine, *_ = deepspeed.initialize(model=model, config=config, optimizer=adam, dist_init_required=False)
    x = torch.ones(2, 8, dtype=torch.bfloat16 if half else torch.float32)
    for number in used:
        engine.backward(engine(x, number).float())
        engine.step()
    with deepspeed.zero.GatheredParameters(list(model.layers[-1].parameters())):
        return model.layers[-1].weight.detach().float().clone()

drive = {{"device": "nvme", "nvme_path": sys.argv[1], "buffer_size": 600000, "max_in_cpu": 0}}
for half, layers, used in ((False, 1, []), (True, 3, [3, 3, 3, 2, 3]), (True, 8, [8, 8])):
    try:
        ours, there = (trained(place, half, layers, used) for place in ({{"device": "cpu"}}, drive))
        print("result", float((ours - there).abs().max()))
    except AssertionError as error:
        print("result", error)
"""


@cache
def library() -> str | None:
    """Build DeepSpeed's library, which takes minutes the first time on a machine; what went wrong, or None."""
    done = subprocess.run(
        [sys.executable, "-c", BUILD], capture_output=True, text=True, check=False
    )
    return (
        None
        if done.returncode == 0
        else f"{INSTALL}: {done.stderr.strip().splitlines()[-1]}"
    )


@pytest.fixture
def built() -> None:
    """Skip where the library cannot be built."""
    if (why := library()) is not None:
        pytest.skip(why)


class Wide(nn.Module):
    """Weights large enough for DeepSpeed to move them (1 MiB on each of two ranks), of a size that blocks do not divide."""

    def __init__(self, rows: int = 70001) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(8, rows), nn.Linear(rows, 8)
        self.third = nn.Linear(8, rows, bias=False)
        self.fourth = nn.Parameter(torch.randn(rows, 8) / rows, requires_grad=False)

    def forward(self, x: Tensor, third: bool) -> Tensor:
        """The third layer is used when told to."""
        out: Tensor = self.second(torch.tanh(self.first(x) + x @ self.fourth.t()))
        return out + self.third(x).square().mean() if third else out


class Run:
    """One training, step by step; SGD, so that a gradient of zero and none are the same, or AdamW."""

    def __init__(
        self,
        accelerator: Accelerator,
        adam: bool = True,
        rows: int = 70001,
        built: bool = False,
    ) -> None:
        self.accelerator = accelerator
        with accelerator.init_module() if built else nullcontext():
            model = Wide(rows)
        trained = [
            parameter for parameter in model.parameters() if parameter.requires_grad
        ]
        optimizer = (
            torch.optim.AdamW(trained, lr=1e-3, weight_decay=0.1)
            if adam
            else torch.optim.SGD(trained, lr=0.1)
        )
        self.model, self.optimizer = accelerator.prepare(model, optimizer)
        self.done, self.norms = 0, [0.0]

    def steps(self, number: int, third: bool = True) -> Run:
        """Train on batches of their own for each step and rank."""
        for _ in range(number):
            seed = 10 * self.done + self.accelerator.process_index
            x = torch.randn(2, 8, generator=torch.Generator().manual_seed(seed))
            with self.accelerator.accumulate(self.model):
                loss = (self.model(x, third) - x).square().mean()
                self.accelerator.backward(loss)
                norm = self.accelerator.clip_grad_norm_(self.model.parameters(), 0.5)
                self.norms += [] if norm is None else [float(norm)]
                self.optimizer.step()
                self.optimizer.zero_grad()
            self.done += 1
        return self

    @property
    def weights(self) -> dict[str, Tensor]:
        """Whole weights."""
        return {
            name: value.clone()
            for name, value in self.accelerator.get_state_dict(self.model).items()
        }


# Any: settings of DeepSpeed
def engine(folder: Path | None, **options: Any) -> dict[str, Any]:
    """Settings with the state in a folder, or in host memory, where sub-groups are the same: they decide the order of sums."""
    zero: dict[str, Any] = {
        "stage": 3,
        "sub_group_size": 1,
        "offload_optimizer": place(folder),
        **options,
    }
    config = {
        "zero_optimization": zero,
        "fp16": {"enabled": "auto", "initial_scale_power": 4},
    }
    return {"strategy": "deepspeed", "deepspeed_plugin": {"hf_ds_config": config}}


def place(folder: Path | None) -> dict[str, Any]:
    return (
        {"device": "cpu"}
        if folder is None
        else {"device": "nvme", "nvme_path": str(folder)}
    )


def assert_equal(
    first: dict[str, Tensor], second: dict[str, Tensor], atol: float = 0.0
) -> None:
    assert first.keys() == second.keys()
    for name, value in first.items():
        far = float((second[name] - value).abs().max())
        assert far <= atol, (name, far)


@ranks(1)
# DeepSpeed's own, for an architecture list with "9.0a"
@pytest.mark.parametrize("kind", [RuntimeError, ValueError])
def test_a_library_that_cannot_be_built_is_told(
    ctx: ProcessContext, tmp_path: Path, kind: type[Exception]
) -> None:
    def no_compiler(self: object, verbose: bool = False) -> None:
        raise kind("no compiler was found")

    Run(Accelerator(**engine(None)))  # DeepSpeed chooses its builders by the device
    builder = need("deepspeed.ops.op_builder").AsyncIOBuilder
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builder, "load", no_compiler)
        with pytest.raises(
            PrepareError,
            match=r"no compiler was found\). Install its build dependencies .*libaio-dev",
        ):
            Run(Accelerator(**engine(tmp_path)))


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
@ranks(2)
def test_state_on_nvme_trains_like_ddp(
    ctx: ProcessContext, tmp_path: Path, built: None
) -> None:
    """Two windows, clipped; the state is on the drive between them."""
    common: dict[str, Any] = {"gradient_accumulation_steps": 2}
    plain = Run(Accelerator(strategy="ddp", **common)).steps(4)
    ours = Run(
        Accelerator(**engine(tmp_path / "nvme", sub_group_size=10**9), **common)
    ).steps(4)
    names = [file.name for file in (tmp_path / "nvme").rglob("*.swp")]
    assert any("exp_avg_sq" in name for name in names), names
    inside = [
        flat.numel() for flat in ours.model.optimizer.fp32_partitioned_groups_flat
    ]
    assert sorted(inside) == [0, 0, 0, 4, 35001], (
        "what is larger than 1 MiB is not in memory"
    )
    torch.testing.assert_close(
        torch.tensor(ours.norms), torch.tensor(plain.norms), rtol=1e-5, atol=1e-7
    )
    assert_equal(plain.weights, ours.weights, atol=2e-6)


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
@ranks(2)
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_state_on_nvme_equals_state_in_host_memory(
    ctx: ProcessContext, tmp_path: Path, built: None, precision: str
) -> None:
    common: dict[str, Any] = {"mixed_precision": precision}
    memory = Run(Accelerator(**engine(None), **common)).steps(4)
    ours = Run(Accelerator(**engine(tmp_path / "nvme"), **common)).steps(4)
    assert_equal(memory.weights, ours.weights)


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
@ranks(2)
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_a_run_with_state_on_nvme_resumes_bit_for_bit(
    ctx: ProcessContext, tmp_path: Path, built: None, precision: str
) -> None:
    """On NVMe again, and from there in host memory; saving changes nothing."""
    common: dict[str, Any] = {"mixed_precision": precision}
    ours = Run(Accelerator(**engine(tmp_path / "nvme"), **common)).steps(3)
    ours.accelerator.save_state(tmp_path / "state")
    ours.steps(3)
    for folder in (tmp_path / "nvme", None):
        again = Run(Accelerator(**engine(folder), **common)).steps(2)
        again.accelerator.load_state(tmp_path / "state")
        again.done = 3
        assert_equal(ours.weights, again.steps(3).weights)
    unsaved = Run(Accelerator(**engine(tmp_path / "nvme"), **common)).steps(6)
    assert_equal(ours.weights, unsaved.weights)


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
@ranks(2)
def test_old_gradients_and_loaded_weights(
    ctx: ProcessContext, tmp_path: Path, built: None
) -> None:
    """A layer that a window does not use is not updated by an old gradient; load_model writes the masters too."""
    plain = (
        Run(
            Accelerator(
                strategy="ddp",
                kwargs_handlers=[
                    DistributedDataParallelKwargs(find_unused_parameters=True)
                ],
            ),
            adam=False,
        )
        .steps(2)
        .steps(2, False)
    )
    ours = (
        Run(Accelerator(**engine(tmp_path / "nvme")), adam=False)
        .steps(2)
        .steps(2, third=False)
    )
    assert_equal(plain.weights, ours.weights, atol=2e-6)
    ours.accelerator.save_model(ours.model, tmp_path / "model")
    trained: list[dict[str, Tensor]] = []
    for strategy in (engine(tmp_path / "nvme"), {"strategy": "ddp"}):
        again = Run(Accelerator(**strategy), adam=False)
        again.accelerator.load_model(again.model, tmp_path / "model")
        again.done = 4
        assert_equal(ours.weights, again.weights)
        trained.append(again.steps(2).weights)
    assert_equal(trained[0], trained[1], atol=2e-6)


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
def test_the_drive_is_left_clean(tmp_path: Path, built: None) -> None:
    """Two engines of one process have a folder each, and both are removed when it ends."""
    two_engines(tmp_path)


def two_engines(folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", TWO_ENGINES, str(folder)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert list(folder.iterdir()) == []


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
def test_the_read_that_is_lost(tmp_path: Path, built: None) -> None:
    """Why a sub-group holds one parameter: DeepSpeed's own library says that it has read, and has not, at 256 bytes."""
    done = subprocess.run(
        [sys.executable, "-c", LOST_READ, str(tmp_path / "written")],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines()[-3:] == [
        "0 (0, 1) True False",
        "512 (0, 1) True False",
        "256 (0, 1) False True",
    ], done.stdout
