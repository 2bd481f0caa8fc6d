"""The file plan: familiar names when small, balanced shards when large, one file per rank when cut into slices."""

from __future__ import annotations

import json

import torch

from hasten.checkpoint.base import Component, Slice
from hasten.checkpoint.save import FileLayout, hub_index, plan_component


def byte_tensors(n: int, size: int = 10) -> dict[str, torch.Tensor | Slice]:
    return {f"p{i}": torch.zeros(size, dtype=torch.uint8) for i in range(n)}


def test_familiar_names() -> None:
    cases = [
        (Component(byte_tensors(1), None, "model"), "model", "model.safetensors"),
        (
            Component(byte_tensors(1), None, "model", "torch"),
            "model",
            "pytorch_model.bin",
        ),
        (
            Component(byte_tensors(1), None, "model", "torch"),
            "model_1",
            "pytorch_model_1.bin",
        ),
        (
            Component(byte_tensors(1), {}, "optimizer", "torch"),
            "optimizer",
            "optimizer.bin",
        ),
        (Component({}, {}, "scheduler", "torch"), "scheduler_1", "scheduler_1.bin"),
        (Component({}, {}, "scaler", "torch"), "scaler", "scaler.pt"),
        (
            Component({}, {}, "random", per_rank=True),
            "random_states",
            "random_states_3.safetensors",
        ),
    ]
    for component, name, expected in cases:
        assert [plan.name for plan in plan_component(name, component, 3, range(4))] == [
            expected
        ]


def test_large_components_are_cut_alike_on_every_rank() -> None:
    for world in range(1, 17):
        for n in (1, 2, 5, 33):
            component = Component(
                byte_tensors(n), None, "model", main_only=frozenset({"p0"})
            )
            plans = [
                plan_component(
                    "model", component, rank, range(world), FileLayout(0, 30)
                )
                for rank in range(world)
            ]
            assert all(plan == plans[0] for plan in plans)
            keys = [key for plan in plans[0] for key in plan.keys]
            assert sorted(keys) == sorted(component.tensors), "each tensor once"
            assert plans[0][0].writer == 0
            assert "p0" in plans[0][0].keys, "what only main knows, main writes"
            assert all(len(plan.keys) <= 3 for plan in plans[0])
            (raw,) = hub_index(plans[0], component).segments
            assert isinstance(raw, bytes)
            assert len(json.loads(raw)["weight_map"]) == n


def test_slices_are_written_once_by_their_owner() -> None:
    for world in range(1, 17):
        written: list[str] = []
        for rank in range(world):
            replicated = torch.zeros(1)
            piece = Slice(torch.zeros(2), (2 * world,), (2 * rank,))
            copy = Slice(torch.zeros(2), (4,), (0,), owned=rank == 0)
            component = Component(
                {"a": piece, "b": replicated, "c": copy}, {"x": 1}, "optimizer", "torch"
            )
            for plan in plan_component("optimizer", component, rank, range(world)):
                assert plan.name == f"optimizer_shard_{rank:05d}.safetensors"
                assert plan.with_data == (rank == 0)
                written += [f"{key}{rank if key == 'a' else ''}" for key in plan.keys]
        assert sorted(written) == sorted(
            [f"a{rank}" for rank in range(world)] + ["b", "c"]
        )


def test_nested_torch_state_becomes_safetensors_when_cut() -> None:
    component = Component(byte_tensors(9), {"nested": 1}, "optimizer", "torch")
    plans = plan_component("optimizer", component, 0, (0, 1), FileLayout(1, 40))
    assert [plan.name for plan in plans] == [
        f"optimizer-{i:05d}-of-00003.safetensors" for i in (1, 2, 3)
    ]
    assert [plan.with_data for plan in plans] == [True, False, False]
    assert [plan.writer for plan in plans] == [0, 1, 0]


def test_files_of_hidden_kinds_start_with_a_dot() -> None:
    layout = FileLayout(hidden=frozenset({"loader", "object"}))
    names = [
        plan_component(
            name, Component({}, 1, kind, per_rank=per_rank), 1, (0, 1), layout
        )[0].name
        for name, kind, per_rank in (
            ("loader", "loader", True),
            ("custom", "object", False),
            ("model", "model", False),
        )
    ]
    assert names == [
        ".loader_1.safetensors",
        ".custom.safetensors",
        "model.safetensors",
    ]


def test_a_large_tensor_has_a_file_of_its_own_while_another_is_being_filled() -> None:
    sizes = {"large": 40, "a": 10, "b": 10, "larger": 50, "c": 10, "d": 10}
    component = Component(
        {name: torch.zeros(size, dtype=torch.uint8) for name, size in sizes.items()},
        None,
        "model",
    )
    plans = plan_component("model", component, 0, (0,), FileLayout(30, 30))
    assert [plan.keys for plan in plans] == [
        ("large",),
        ("larger",),
        ("a", "b", "c"),
        ("d",),
    ]
