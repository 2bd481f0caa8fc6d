"""Parameters and optimizer state on NVMe change no number: training, clipping, checkpoints, and parameters that a window does not use."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any, Final
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from hasten import Accelerator, DistributedDataParallelKwargs
from hasten.errors import DeviceError, PeerFailedError, PrepareError
from hasten.optional import available, need
from hasten.runtime.context import ProcessContext
from hasten.strategies.engines.deepspeed.engine import VERSIONS
from hasten.strategies.engines.deepspeed.nvme import INSTALL
from hasten.testing.pool import Pool, ranks

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
from hasten.strategies.engines.deepspeed.nvme import build_library
build_library()
"""
TWO_ENGINES: Final = """
import os
import pathlib
import sys
import torch
from hasten import Accelerator
zero = {"stage": 3, f"offload_{sys.argv[2]}": {"device": "nvme", "nvme_path": sys.argv[1]}}
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
    done = subprocess.run([sys.executable, "-c", BUILD], capture_output=True, text=True, check=False)
    return None if done.returncode == 0 else f"{INSTALL}: {done.stderr.strip().splitlines()[-1]}"


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

    def __init__(self, accelerator: Accelerator, adam: bool = True, rows: int = 70001, built: bool = False) -> None:
        self.accelerator = accelerator
        with accelerator.init_module() if built else nullcontext():
            model = Wide(rows)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-3, weight_decay=0.1) if adam else torch.optim.SGD(trained, lr=0.1)
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
        return {name: value.clone() for name, value in self.accelerator.get_state_dict(self.model).items()}


def engine(folder: Path | None, **options: Any) -> dict[str, Any]:  # Any: settings of DeepSpeed
    """Settings with the state in a folder, or in host memory, where sub-groups are the same: they decide the order of sums."""
    zero: dict[str, Any] = {"stage": 3, "sub_group_size": 1, "offload_optimizer": place(folder), **options}
    config = {"zero_optimization": zero, "fp16": {"enabled": "auto", "initial_scale_power": 4}}
    return {"strategy": "deepspeed", "deepspeed_plugin": {"hf_ds_config": config}}


def place(folder: Path | None) -> dict[str, Any]:
    return {"device": "cpu"} if folder is None else {"device": "nvme", "nvme_path": str(folder)}


def assert_equal(first: dict[str, Tensor], second: dict[str, Tensor], atol: float = 0.0) -> None:
    assert first.keys() == second.keys()
    for name, value in first.items():
        far = float((second[name] - value).abs().max())
        assert far <= atol, (name, far)


@ranks(1)
@pytest.mark.parametrize("kind", [RuntimeError, ValueError])  # DeepSpeed's own, for an architecture list with "9.0a"
def test_a_library_that_cannot_be_built_is_told(ctx: ProcessContext, tmp_path: Path, kind: type[Exception]) -> None:
    def no_compiler(self: object, verbose: bool = False) -> None:
        raise kind("no compiler was found")

    Run(Accelerator(**engine(None)))  # DeepSpeed chooses its builders by the device
    builder = need("deepspeed.ops.op_builder").AsyncIOBuilder
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builder, "load", no_compiler)
        with pytest.raises(PrepareError, match=r"no compiler was found\). Install its build dependencies .*libaio-dev"):
            Run(Accelerator(**engine(tmp_path)))


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
@ranks(2)
def test_state_on_nvme_trains_like_ddp(ctx: ProcessContext, tmp_path: Path, built: None) -> None:
    """Two windows, clipped; the state is on the drive between them."""
    common: dict[str, Any] = {"gradient_accumulation_steps": 2}
    plain = Run(Accelerator(strategy="ddp", **common)).steps(4)
    ours = Run(Accelerator(**engine(tmp_path / "nvme", sub_group_size=10**9), **common)).steps(4)
    names = [file.name for file in (tmp_path / "nvme").rglob("*.swp")]
    assert any("exp_avg_sq" in name for name in names), names
    inside = [flat.numel() for flat in ours.model.optimizer.fp32_partitioned_groups_flat]
    assert sorted(inside) == [0, 0, 0, 4, 35001], "what is larger than 1 MiB is not in memory"
    torch.testing.assert_close(torch.tensor(ours.norms), torch.tensor(plain.norms), rtol=1e-5, atol=1e-7)
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
def test_old_gradients_and_loaded_weights(ctx: ProcessContext, tmp_path: Path, built: None) -> None:
    """A layer that a window does not use is not updated by an old gradient; load_model writes the masters too."""
    plain = (
        Run(
            Accelerator(strategy="ddp", kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)]),
            adam=False,
        )
        .steps(2)
        .steps(2, False)
    )
    ours = Run(Accelerator(**engine(tmp_path / "nvme")), adam=False).steps(2).steps(2, third=False)
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
    two_engines(tmp_path, "optimizer")


@pytest.mark.exhaustive
def test_the_drive_is_left_clean_of_parameters(tmp_path: Path) -> None:
    two_engines(tmp_path, "param")


def two_engines(folder: Path, part: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", TWO_ENGINES, str(folder), part], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert list(folder.iterdir()) == []


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
def test_the_read_that_is_lost(tmp_path: Path, built: None) -> None:
    """Why a sub-group holds one parameter: DeepSpeed's own library says that it has read, and has not, at 256 bytes."""
    done = subprocess.run(
        [sys.executable, "-c", LOST_READ, str(tmp_path / "written")], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-3:] == [
        "0 (0, 1) True False",
        "512 (0, 1) True False",
        "256 (0, 1) False True",
    ], done.stdout


# ---------------------------------------------------------------- parameters


@contextmanager
def fp16_on_any_cpu() -> Iterator[None]:
    """Context manager in which DeepSpeed does not refuse fp16 on CPUs without fp16 instructions."""
    with mock.patch.object(type(need("deepspeed").get_accelerator()), "is_fp16_supported", return_value=True):
        yield


def on_drive(run: Run) -> dict[str, int]:
    """The elements in memory of the parts that lie on the drive, by name."""
    return {
        name: parameter.ds_tensor.numel()
        for name, parameter in run.model.module.named_parameters()
        if parameter.ds_tensor.final_location == "nvme"
    }


@ranks(2, exhaustive=(1,))
@pytest.mark.parametrize(
    ("precision", "accumulation"),
    [
        ("bf16", 3),
        *(
            pytest.param(*both, marks=pytest.mark.exhaustive)
            for both in (("bf16", 1), ("no", 1), ("no", 3), ("fp16", 1), ("fp16", 3))
        ),
    ],
)
def test_parameters_on_nvme_train_as_in_host_memory(
    ctx: ProcessContext, tmp_path: Path, precision: str, accumulation: int
) -> None:
    """Bit for bit, clipped, also where a layer is not used for a while: what was read ahead for it must not come back later."""
    common: dict[str, Any] = {"mixed_precision": precision, "gradient_accumulation_steps": accumulation}
    runs = []
    with fp16_on_any_cpu() if precision == "fp16" else nullcontext():
        for folder in (None, tmp_path):
            settings = engine(None, offload_param=place(folder), stage3_max_reuse_distance=0)
            run = Run(Accelerator(**settings, **common), rows=150001)
            run.steps(3 * accumulation - 1).steps(1, third=False)  # the last of a window
            run.steps(2 * accumulation).steps(accumulation, third=False)
            runs.append(run)
        memory, ours = runs
        assert set(on_drive(ours)) == {"first.weight", "second.weight", "third.weight", "fourth"}
        in_memory = on_drive(ours)
        assert any(norm > 0.5 for norm in ours.norms)
        assert memory.norms == ours.norms
        assert_equal(memory.weights, ours.weights)
        assert not any(in_memory.values()), in_memory


ONE_BY_ONE: Final = {"stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 0}
"""Settings with which ZeRO-3 gathers each layer when it is called, and releases it at once."""


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
@ranks(1, 2, timeout_s=300)
@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize(
    ("options", "parameters"),
    [
        pytest.param({"offload_optimizer": {"device": "none"}}, {}, id="masters on the device"),
        pytest.param({"sub_group_size": 10**9}, {}, id="one sub-group"),
        pytest.param({}, {"max_in_cpu": 700_000}, id="some in host memory"),
        pytest.param(ONE_BY_ONE, {"buffer_count": 1}, id="one by one"),
        pytest.param(ONE_BY_ONE | {"memory_efficient_linear": False}, {}, id="views kept for the backward"),
        pytest.param({"stage3_param_persistence_threshold": 10**9}, {}, id="kept whole"),
    ],
)
def test_parameters_on_nvme_with_other_settings(
    ctx: ProcessContext, tmp_path: Path, precision: str, options: dict[str, Any], parameters: dict[str, Any]
) -> None:
    """Models built whole and built partitioned."""
    settings = [
        engine(None, **options, offload_param=place(None)),
        engine(None, **options, offload_param=place(tmp_path) | parameters),
    ]
    memory, ours, built = (
        Run(Accelerator(mixed_precision=precision, **one), rows=150001, built=built).steps(3)
        for one, built in ((settings[0], False), (settings[1], False), (settings[1], True))
    )
    assert on_drive(ours)
    assert on_drive(built) == on_drive(ours)
    assert_equal(memory.weights, ours.weights)
    assert_equal(memory.weights, built.weights)


def save_parameters(ctx: ProcessContext, folder: Path, precision: str) -> tuple[Any, Any]:
    """Weights when they were saved, and after three steps more; saving changed nothing."""
    settings = engine(None, offload_param=place(folder / "nvme"))
    run = Run(Accelerator(mixed_precision=precision, **settings), rows=WIDE).steps(3)
    run.accelerator.save_state(folder / "state")
    run.accelerator.save_model(run.model, folder / "model")
    saved = run.weights
    unsaved = Run(Accelerator(mixed_precision=precision, **settings), rows=WIDE).steps(6).weights
    assert_equal(run.steps(3).weights, unsaved)
    assert not any(on_drive(run).values()), on_drive(run)
    return saved, unsaved


def load_parameters(ctx: ProcessContext, folder: Path, precision: str, drive: bool) -> tuple[Any, Any, Any]:
    """Weights after load_state, after three steps more, and after load_model and two steps, which the masters must follow."""
    settings = engine(None, offload_param=place(folder / "nvme" if drive else None))
    run = Run(Accelerator(mixed_precision=precision, **settings), rows=WIDE).steps(2)
    run.accelerator.load_state(folder / "state")
    run.done = 3
    loaded = run.weights
    run.steps(3)
    other = Run(Accelerator(mixed_precision=precision, **settings), rows=WIDE)
    other.accelerator.load_model(other.model, folder / "model")
    assert_equal(other.weights, loaded)
    return loaded, run.weights, other.steps(2).weights


WIDE: Final = 270001
"""Rows with which a part of a weight is larger than 1 MiB in 16 bits on three ranks too."""


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_parameters_on_nvme_are_saved_and_loaded(rank_pool: Pool, tmp_path: Path, precision: str) -> None:
    """On the same number of processes bit for bit, on others, and in host memory."""
    saved, after = rank_pool.run(save_parameters, 2, tmp_path, precision, timeout_s=600)[0]
    for world in (2, 1, 3):
        _, there, exported = rank_pool.run(load_parameters, world, tmp_path, precision, False, timeout_s=600)[0]
        for loaded, trained, fresh in rank_pool.run(load_parameters, world, tmp_path, precision, True, timeout_s=600):
            assert_equal(saved, loaded)
            assert_equal(trained, there)
            assert_equal(fresh, exported)
            if world == 2:
                assert_equal(trained, after)


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
@ranks(2, timeout_s=600)
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_parameters_and_state_on_nvme(ctx: ProcessContext, tmp_path: Path, built: None, precision: str) -> None:
    common: dict[str, Any] = {"mixed_precision": precision}
    memory = Run(Accelerator(**engine(None), **common), rows=150001).steps(5)
    settings = engine(tmp_path / "state", offload_param=place(tmp_path / "weights"))
    ours = Run(Accelerator(**settings, **common), rows=150001).steps(3)
    ours.accelerator.save_state(tmp_path / "saved")
    assert_equal(memory.weights, ours.steps(2).weights)
    again = Run(Accelerator(**settings, **common), rows=150001).steps(1)
    again.accelerator.load_state(tmp_path / "saved")
    again.done = 3
    assert_equal(memory.weights, again.steps(2).weights)


@pytest.mark.exhaustive
@ranks(2)
def test_a_drive_that_cannot_be_used_is_told(ctx: ProcessContext, tmp_path: Path) -> None:
    """Before training on every rank, when one cannot write or has too little room; later, when files are gone."""
    folder = tmp_path / "nvme"
    (tmp_path / "file").touch()
    with pytest.raises(
        PrepareError, match=r"offload_param.nvme_path=.* cannot be written .*, so the model cannot be stored"
    ):
        Run(Accelerator(**engine(None, offload_param=place(tmp_path / "file" / "in it"))))
    with small_files(2**20 if ctx.rank == 1 else None):
        words = r"parameters of Wide do not fit into .* \(\[Errno 27\] .*Free space there"
        kind = PrepareError if ctx.rank == 1 else PeerFailedError
        with pytest.raises(kind, match=words):
            Run(Accelerator(**engine(None, offload_param=place(folder))))
    run = Run(Accelerator(**engine(None, offload_param=place(folder)))).steps(1)
    run.accelerator.wait_for_everyone()
    shutil.rmtree(folder, ignore_errors=True)
    run.accelerator.wait_for_everyone()
    with pytest.raises(DeviceError, match=r"part of fourth could not be read .*No such file"):
        run.steps(1)


@contextmanager
def small_files(limit: int | None) -> Iterator[None]:
    """A block in which this process can write no file larger than the limit."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (before[0] if limit is None else limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
def test_why_parameters_are_in_files_of_our_own(tmp_path: Path, built: None) -> None:
    """What DeepSpeed's own files do: round float32, lose the update of a layer that a step did not use, and run out of buffers."""
    place = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    done = subprocess.run(
        [sys.executable, "-c", BARE, str(tmp_path)], capture_output=True, text=True, check=True, env=os.environ | place
    )
    rounded, lost, full = (
        line.removeprefix("result ") for line in done.stdout.splitlines() if line.startswith("result ")
    )
    assert float(rounded) > 1e-4 or torch.ops.mkldnn._is_mkldnn_fp16_supported()
    assert float(lost) > 1e-4
    assert full.startswith("Not enough buffers")
