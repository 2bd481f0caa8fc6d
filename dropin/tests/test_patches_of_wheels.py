"""Patches that large clients ship, taken from unpacked wheels in the folder CLIENT_WHEELS, act on the drop-in."""

from __future__ import annotations

import importlib
import os
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

import accelerate.accelerator
import accelerate.data_loader
from accelerate import Accelerator, ParallelismConfig
from accelerate.state import AcceleratorState

WHEELS = Path(os.environ.get("CLIENT_WHEELS", "nowhere"))
pytestmark = [
    pytest.mark.usefixtures("fresh_states"),
    pytest.mark.skipif(
        not WHEELS.is_dir(), reason="CLIENT_WHEELS names no folder of unpacked wheels"
    ),
    pytest.mark.filterwarnings("ignore"),  # of the clients' modules
]
# Any in this file: modules of clients.


@pytest.fixture
def unpatched() -> Any:
    """Put back what a test's patch replaces."""
    owners = (
        Accelerator,
        ParallelismConfig,
        AcceleratorState,
        accelerate.accelerator,
        accelerate.data_loader,
        accelerate,
    )
    original_attributes = [(owner, dict(vars(owner))) for owner in owners]
    yield
    for owner, attributes in original_attributes:
        for name, value in vars(owner).copy().items():
            if name not in attributes:
                delattr(owner, name)
            elif value is not attributes[name]:
                setattr(owner, name, attributes[name])


def load(path: str) -> Any:
    """Import one file of a wheel by itself."""
    spec = spec_from_file_location(Path(path).stem, next(WHEELS.glob(path)))
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def unsloth(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make unsloth's modules importable without its start, which needs a GPU."""
    folder = next(WHEELS.glob("**/unsloth/models")).parent
    for name, package_folder in (
        ("unsloth", folder),
        ("unsloth.models", folder / "models"),
    ):
        package = ModuleType(name)
        package.__path__ = [str(package_folder)]
        monkeypatch.setitem(sys.modules, name, package)


@pytest.mark.usefixtures("unpatched")
def test_axolotl_adds_an_axis_of_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARALLELISM_CONFIG_EP_SIZE", "2")
    load(
        "**/axolotl/monkeypatch/accelerate/parallelism_config.py"
    ).patch_parallelism_config()
    sizes: Any = ParallelismConfig()
    assert (sizes.total_size, sizes.dp_dim_names, sizes.active_mesh_dims) == (
        2,
        ["ep"],
        ["ep"],
    )
    assert sizes._get_mesh() == (("ep",), (2,))
    with pytest.raises(ValueError, match="ep_size"):  # the client's own words
        Accelerator(cpu=True, parallelism_config=sizes)


@pytest.mark.usefixtures("unpatched", "unsloth")
def test_unsloth_gives_ranks_of_a_split_model_the_same_batches() -> None:
    split = importlib.import_module("unsloth.models.tp_native")
    split._install_tp_accelerate_hooks()
    accelerator: Any = Accelerator(cpu=True)
    vars(accelerator)[split._TP_DATA] = (2, 1)
    loader = accelerator.prepare(
        DataLoader(TensorDataset(torch.arange(16)), batch_size=2)
    )
    assert [batch.tolist() for (batch,) in loader] == [
        [2, 3],
        [6, 7],
        [10, 11],
        [14, 15],
    ]
    assert type(accelerator) is Accelerator and accelerator.num_processes == 1


@pytest.mark.usefixtures("unpatched", "unsloth")
def test_unsloth_passes_models_through_that_it_has_sharded() -> None:
    native = importlib.import_module("unsloth.models.fsdp2_native")
    native._install_accelerate_hooks()
    accelerator: Any = Accelerator(cpu=True)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    sharded: Any = fully_shard(nn.Linear(1, 1))
    setattr(sharded, native._NATIVE_FLAG, True)
    with pytest.raises(RuntimeError, match="outside a Trainer is not supported"):
        accelerator.prepare(sharded)
    setattr(accelerator, native._TRAINER_ACCELERATOR, True)
    model, optimizer = accelerator.prepare(
        sharded, torch.optim.SGD(sharded.parameters(), lr=0.1)
    )
    assert model is sharded
    accelerator.backward(model(torch.ones(2, 1)).sum())
    assert accelerator.clip_grad_norm_(model.parameters(), 1.0) > 1.0
    optimizer.step()
    assert set(accelerator.get_state_dict(model)) == {"weight", "bias"}
    with pytest.raises(RuntimeError, match=r"accelerator\.save_state\(\)"):
        accelerator.save_state("nowhere")
