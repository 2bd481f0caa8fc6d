"""prepare_pippy() and what stands beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accelerate import inference

SCRIPT = Path(__file__).parent / "scripts" / "pippy.py"


@pytest.mark.timeout(240)
def test_two_processes_hold_half_of_the_model_each_and_give_its_outputs(
    warm: Any, tmp_path: Path
) -> None:
    pytest.importorskip("transformers")
    done = warm.run(tmp_path, [str(SCRIPT)], 2)
    assert not done.failed, done.err[0][-3000:] + done.err[1][-3000:]
    assert all("fine" in out for out in done.out)


@pytest.mark.timeout(240)
def test_stages_by_hand_give_their_output_to_every_process(
    warm: Any, tmp_path: Path
) -> None:
    done = warm.run(tmp_path, [str(SCRIPT.with_name("stages.py"))], 2)
    assert not done.failed, done.err[0][-3000:] + done.err[1][-3000:]
    assert [out.split(")")[0] for out in done.out] == ["(3, 2"] * 2
    assert all(float(out.split()[-1]) < 1e-6 for out in done.out)


def test_maps_divide_the_model_evenly_in_order() -> None:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))
    for processes in (2, 3):
        ranks = list(inference.generate_device_map(model, processes).values())
        assert ranks == sorted(ranks)
        assert [ranks.count(rank) for rank in range(processes)] == [
            6 // processes
        ] * processes


def test_the_batch_is_found_in_any_argument() -> None:
    assert inference.find_pippy_batch_size((1, torch.zeros(3, 2)), None) == 3
    assert inference.find_pippy_batch_size(None, {"a": torch.zeros(5, 2)}) == 5
    assert inference.find_pippy_batch_size((), {}) is None
