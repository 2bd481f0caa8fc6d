"""Seeding and the state of random generators: exact round trips, no pickle, nothing swallowed."""

from __future__ import annotations

import json
import logging
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

from hasten.comm.local import LocalComm
from hasten.errors import ConfigError, CorruptCheckpointError, DeviceError
from hasten.runtime import env
from hasten.runtime.seeding import RngState, set_seed, synchronize_rng_states
from hasten.state.run_state import Randomness


def draw_from_all() -> tuple[float, ...]:
    """Numbers from every generator, Gaussians included: those are cached in pairs."""
    return (
        random.random(),
        random.gauss(0, 1),
        float(np.random.rand()),
        float(np.random.randn()),
        torch.rand(1).item(),
        torch.randn(1).item(),
    )


def test_the_same_seed_gives_the_same_numbers() -> None:
    assert set_seed(7) == 7
    first = draw_from_all()
    set_seed(8)
    assert draw_from_all() != first
    set_seed(7)
    assert draw_from_all() == first


def test_device_specific_seeds_differ_by_rank() -> None:
    assert [set_seed(5, device_specific=True, rank=rank) for rank in range(3)] == [
        5,
        6,
        7,
    ]
    with env.restored_environment():
        env.replace_environment(
            {
                **env.snapshot(),
                "RANK": "2",
                "WORLD_SIZE": "4",
                "LOCAL_RANK": "2",
                "LOCAL_WORLD_SIZE": "4",
            }
        )
        assert set_seed(5, device_specific=True) == 7
        assert set_seed(5) == 5


def test_large_seeds_work_and_negative_ones_are_refused() -> None:
    set_seed(2**40 + 1)
    with pytest.raises(ConfigError, match="seed=-1 is negative"):
        set_seed(-1)


def test_deterministic_mode() -> None:
    cudnn_flags = torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark
    try:
        set_seed(1, deterministic=True)
        assert torch.are_deterministic_algorithms_enabled()
        assert torch.backends.cudnn.deterministic
        assert not torch.backends.cudnn.benchmark
    finally:
        torch.use_deterministic_algorithms(False)
        torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = cudnn_flags


@pytest.mark.parametrize("drawn_before", range(4))
def test_state_round_trip_is_exact(drawn_before: int) -> None:
    set_seed(3)
    for _ in range(drawn_before):
        random.gauss(0, 1)
        np.random.randn()
        draw_from_all()
    state = RngState.capture()
    expected = [draw_from_all() for _ in range(3)]
    set_seed(99)
    RngState.from_tree(state.tree).restore()
    assert [draw_from_all() for _ in range(3)] == expected


def split_tree(tree: dict[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    tensors: dict[str, torch.Tensor] = {}
    json_values: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            inner_tensors, inner_json = split_tree(value)
            tensors |= {
                f"{key}/{name}": tensor for name, tensor in inner_tensors.items()
            }
            json_values[key] = inner_json
        elif isinstance(value, torch.Tensor):
            tensors[key] = value
        else:
            json_values[key] = value
    return tensors, json_values


def test_state_is_tensors_and_json(tmp_path: Path) -> None:
    """It survives a file of tensors and a file of JSON, with no pickle anywhere."""
    set_seed(11)
    random.gauss(0, 1)
    np.random.randn()
    tensors, json_values = split_tree(dict(RngState.capture().tree))
    expected = draw_from_all()
    safetensors.torch.save_file(tensors, tmp_path / "t.safetensors")
    data = json.loads(json.dumps(json_values))
    loaded = safetensors.torch.load_file(tmp_path / "t.safetensors")
    tree = {
        "python": {**data["python"], "words": loaded["python/words"]},
        "numpy": {**data["numpy"], "words": loaded["numpy/words"]},
        "torch": loaded["torch"],
        "device": data["device"],
    }
    set_seed(0)
    RngState.from_tree(tree).restore()
    assert draw_from_all() == expected


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"python": {}}, "KeyError"),
        ({"torch": [1, 2]}, "expected a torch.uint8 vector, found list"),
        ({"torch": torch.zeros(3)}, "expected a torch.uint8 vector"),
        ({"numpy": None}, "TypeError"),
        ({"device": {"type": "cuda"}}, "KeyError: 'state'"),
    ],
)
def test_damaged_state_is_refused(change: dict[str, Any], match: str) -> None:
    tree = {**RngState.capture().tree, **change}
    with pytest.raises(CorruptCheckpointError, match=match):
        RngState.from_tree(tree)


def test_short_words_are_refused() -> None:
    tree = RngState.capture().tree
    tree["python"]["words"] = tree["python"]["words"][:-1]
    with pytest.raises(CorruptCheckpointError, match=r"vector of 625, found .*624"):
        RngState.from_tree(tree)


def test_state_of_another_kind_of_device_is_an_error_unless_accepted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    set_seed(1)
    tree = {
        **RngState.capture().tree,
        "device": {"type": "cuda", "state": torch.zeros(16, dtype=torch.uint8)},
    }
    expected = draw_from_all()
    state = RngState.from_tree(tree)
    with pytest.raises(
        DeviceError,
        match=r"captured on 'cuda' and this process works on 'cpu'.*missing='warn'",
    ):
        state.restore("cpu")
    # before a load changes anything
    with pytest.raises(DeviceError, match="captured on 'cuda'"):
        Randomness(torch.device("cpu")).restoring({"seed": 1, "generators": tree})
    with caplog.at_level(logging.WARNING):
        state.restore("cpu", missing="warn")
    assert "captured on 'cuda'" in caplog.text
    assert draw_from_all() == expected


def test_synchronizing_alone_changes_nothing() -> None:
    set_seed(4)
    generator = torch.Generator().manual_seed(4)
    state = RngState.capture()
    expected = (
        draw_from_all(),
        torch.rand(1, generator=torch.Generator().manual_seed(4)).item(),
    )
    state.restore()
    synchronize_rng_states(
        ["python", "numpy", "torch", "device", "generator", "cpu"],
        LocalComm(),
        generator,
    )
    assert (draw_from_all(), torch.rand(1, generator=generator).item()) == expected


def test_unknown_types_are_refused() -> None:
    with pytest.raises(
        ConfigError,
        match=r"rng type 'cuda' is not known.*python, numpy, torch, device, generator",
    ):
        synchronize_rng_states(["cuda"], LocalComm())
    with pytest.raises(
        ConfigError, match=r"'generator' without a generator.*pass generator"
    ):
        synchronize_rng_states(["generator"], LocalComm())
