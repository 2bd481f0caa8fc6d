"""Start-up: `from accelerate import Accelerator` loads what a run on one process needs, and costs no more than the original's."""

from __future__ import annotations

import ast
import subprocess
import sys
from typing import Final

import pytest

SHARE: Final = 0.25
"""Processor time of the import and the constructor, as a part of that of the import of torch; the original's is 0.3."""
TRIES: Final = 8
LATER: Final = (
    "accelerate._impl.checkpoints.by_hand",
    "accelerate._impl.checkpoints.fsdp",
    "accelerate._impl.models.modeling",
    "accelerate._impl.sharding.sequences",
    "hasten.extensions.bigmodel.dispatch",
    "hasten.checkpoint.export",
    "hasten.state.saving",
    "hasten.strategies.context",
    "hasten.extensions.deepspeed.strategy",
    "hasten.strategies.fsdp",
    "rich",
    "safetensors",
    "sympy",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "yaml",
)


def printed_by(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    return done.stdout.splitlines()[-1]


@pytest.mark.parametrize(
    "code",
    [
        "from accelerate import Accelerator; Accelerator(cpu=True)",
        "from accelerate import Accelerator, PartialState, FullyShardedDataParallelPlugin, DataLoaderConfiguration",
        "from accelerate.state import AcceleratorState; from accelerate.utils import set_seed, DistributedType",
        "from accelerate.utils import ProjectConfiguration, DeepSpeedPlugin, gather_object, is_bf16_available",
        "from accelerate.logging import get_logger; from accelerate.data_loader import DataLoaderShard",
    ],
)
def test_a_start_loads_nothing_that_its_run_does_not_need(code: str) -> None:
    script = f"import sys, torch; before = set(sys.modules); {code}; print([m for m in {LATER!r} if m in sys.modules.keys() - before])"
    assert ast.literal_eval(printed_by(script)) == []


def share_of_torch() -> float:
    script = (
        "import time\nbegun = time.process_time()\nimport torch\nof_torch = time.process_time() - begun\nbegun = time.process_time()\n"
        "from accelerate import Accelerator\nAccelerator(cpu=True)\nprint((time.process_time() - begun) / of_torch)"
    )
    return float(printed_by(script))


@pytest.mark.timed
def test_a_start_is_quick() -> None:
    best = float("inf")
    for _ in range(TRIES):
        best = min(best, share_of_torch())
        if best < SHARE:
            break
    assert best < SHARE, (
        f"importing and making an Accelerator take {best:.2f} of torch's import"
    )
