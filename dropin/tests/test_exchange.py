"""A checkpoint goes to the original package and back: a run that is resumed on the other package is the run that went on.

The original runs in the environment that `make parity` creates; without it only the files' form is compared, with recorded ones.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState

TESTS_FOLDER = Path(__file__).parent
ORIGINAL = TESTS_FOLDER.parent.parent / ".parity" / "bin" / "python"
original = pytest.mark.skipif(
    not ORIGINAL.exists(), reason="the original is not installed: `make parity` does it"
)


@pytest.fixture
def accelerator() -> Any:
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    yield Accelerator(cpu=True)
    AcceleratorState._reset_state(True)


def form(value: Any) -> Any:
    """The types in a value."""
    if isinstance(value, dict):
        return {key: form(member) for key, member in value.items()}
    return (
        (type(value), [form(member) for member in value[:4]])
        if isinstance(value, tuple)
        else type(value)
    )


def test_random_states_have_the_recorded_form_and_other_files_are_hidden(
    accelerator: Any, tmp_path: Path
) -> None:
    golden = TESTS_FOLDER / "golden" / "checkpoint"
    random.seed(0)  # another test's random.gauss() leaves a number in the state
    model, optimizer = accelerator.prepare(
        model := nn.Linear(2, 1), torch.optim.Adam(model.parameters())
    )
    scheduler = accelerator.prepare(torch.optim.lr_scheduler.StepLR(optimizer, 2))
    accelerator.register_for_checkpointing(scheduler)
    accelerator.save_state(tmp_path / "one")
    written_names = {
        path.name
        for path in (tmp_path / "one").iterdir()
        if not path.name.startswith(".")
    }
    recorded = {path.name for path in golden.iterdir()} - {"losses.json"}
    assert written_names == recorded | {"manifest.json", "custom_checkpoint_0.pkl"}
    written_states, recorded_states = (
        torch.load(f / "random_states_0.pkl", weights_only=False)
        for f in (tmp_path / "one", golden)
    )
    assert form(written_states) == form(recorded_states)


def test_a_model_and_a_checkpoint_may_share_a_folder(
    accelerator: Any, tmp_path: Path
) -> None:
    """Files that are written over a checkpoint count, as with the original: its other parts stay what they are."""
    model, optimizer = accelerator.prepare(
        model := nn.Linear(2, 1), torch.optim.SGD(model.parameters(), lr=1.0)
    )
    accelerator.save_model(model, tmp_path)
    model.weight.data.fill_(1.0)
    accelerator.save_state(tmp_path)  # over the model
    model.weight.data.fill_(2.0)
    accelerator.save_model(model, tmp_path)  # over the checkpoint's model
    optimizer.param_groups[0]["lr"] = 3.0
    model.weight.data.fill_(4.0)
    accelerator.load_state(tmp_path)
    assert (
        model.weight.tolist() == [[2.0, 2.0]] and optimizer.param_groups[0]["lr"] == 1.0
    )
    accelerator.save_state(tmp_path)
    accelerator.save(model.state_dict(), tmp_path / "own.pkl")
    accelerator.load_state(tmp_path)
    accelerator.save(model.state_dict(), tmp_path / "custom_checkpoint_0.pkl")
    with pytest.raises(
        RuntimeError, match=r"Found checkpoints: 1\s+Registered objects: 0"
    ):
        accelerator.load_state(tmp_path)


def test_a_damaged_file_is_still_an_error(accelerator: Any, tmp_path: Path) -> None:
    model = accelerator.prepare(nn.Linear(2, 1))
    accelerator.save_state(tmp_path)
    weights, file_status = (
        tmp_path / "model.safetensors",
        (tmp_path / "model.safetensors").stat(),
    )
    raw = bytearray(weights.read_bytes())
    raw[-1] ^= 1
    weights.write_bytes(raw)
    os.utime(weights, ns=(file_status.st_atime_ns, file_status.st_mtime_ns))
    with pytest.raises(Exception, match=r"model\.safetensors"):
        accelerator.load_state(tmp_path)
    assert model.weight.shape == (1, 2)


def run(python: str, processes: int, *args: str) -> Any:
    """What the script gives in an environment, per process."""
    env = {
        name: value
        for name, value in os.environ.items()
        if name != "PYTHONPATH" or python == sys.executable
    }
    start = (
        ["-m", "torch.distributed.run", "--nproc_per_node", str(processes)]
        if processes > 1
        else []
    )
    command = [python, *start, str(TESTS_FOLDER / "scripts" / "exchange.py"), *args]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**env, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(Path(args[-1]).read_text())


@original
@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("first", ["original", "drop-in"])
def test_a_run_goes_on_in_the_other_package(
    first: str, processes: int, tmp_path: Path
) -> None:
    sides = [str(ORIGINAL), sys.executable]
    first_python, second_python = sides if first == "original" else sides[::-1]
    went_on = run(
        first_python,
        processes,
        "save",
        str(tmp_path / "folder"),
        str(tmp_path / "saved.json"),
    )
    resumed, same_package = (
        run(side, processes, "load", str(tmp_path / "folder"), str(tmp_path / "o"))
        for side in (second_python, first_python)
    )
    assert len(went_on) == processes and len(went_on[0]["rows"]) > 3
    assert (
        resumed == same_package
    )  # the losses, with dropout and noise of every generator
    assert [position(rank) for rank in resumed] == [position(rank) for rank in went_on]


def position(rank: dict[str, Any]) -> list[Any]:
    """All but the losses: opening the iterator again draws a number that the run that went on did not draw."""
    return [
        rank["step"],
        *([batch, rate, counter] for batch, _, rate, counter in rank["rows"]),
    ]
