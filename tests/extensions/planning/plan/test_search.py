"""The search offers only meshes and batches that multiply out, ranks by use and time, and says in one sentence why nothing fits."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from hasten.config import files
from hasten.errors import ConfigError
from hasten.extensions.planning.plan import hardware, report
from hasten.extensions.planning.plan.memory import (
    count_rank_bytes,
    local_numel,
    predict_memory,
)
from hasten.extensions.planning.plan.search import (
    FEATURE_COST,
    LayoutPlan,
    Option,
    PlanRequest,
    list_layouts,
    search_layouts,
)
from hasten.extensions.planning.plan.traced import Candidate, ParameterKind
from hasten.extensions.planning.plan.traffic import count_sent_bytes, count_weights
from hasten.runtime.bytes_plan import data_traffic, held_bytes
from hasten.runtime.mesh_plan import MeshSpec, divisors
from tests.extensions.planning.plan.llama import llama

SMALL = llama(layers=8, width=1024, sequence=1024)


def request(gpus: int, gpu: str = "h200", batch: int | None = None) -> PlanRequest:
    return PlanRequest(
        gpus=gpus,
        accelerator=hardware.find_accelerator(gpu),
        global_batch=batch or 4 * gpus,
    )


def test_every_layout_has_the_asked_number_of_ranks_and_samples() -> None:
    for gpus in (*range(1, 17), 48, 4096):
        plan_request = request(gpus)
        assert all(
            layout.mesh.world_size == gpus
            for layout in list_layouts(SMALL, plan_request)
        )
        for option in search_layouts(SMALL, plan_request).options:
            assert option.candidate.global_batch == plan_request.global_batch


def test_shards_of_all_ranks_make_the_whole_parameter() -> None:
    for ranks in (*range(1, 17), 4096):
        layout = Candidate(mesh=MeshSpec(dp_shard=ranks), sharded=True)
        for shape in ((1,), (7, 3), (16,), (1000, 2), (4096, 4)):
            kind = ParameterKind(shape=shape)
            assert (
                sum(local_numel(kind, layout, rank) for rank in range(ranks))
                == kind.numel
            )


def test_even_shards_agree_with_the_formulas_of_the_runtime() -> None:
    """Two descriptions of the same thing: bytes per rank from shapes, and from sums of numbers."""
    trace = llama()
    for mesh in (
        MeshSpec(dp_shard=1024),
        MeshSpec(dp_shard=256, tp=4),
        MeshSpec(dp_replicate=8, dp_shard=128),
    ):
        layout = Candidate(mesh=mesh, sharded=True)
        parameters, gradients, optimizer = count_rank_bytes(trace, layout)
        counters = (
            sum(kind.count for kind in trace.parameters) * trace.optimizer.counter_bytes
        )
        expected = held_bytes(mesh, count_weights(trace, layout))
        assert (parameters, gradients) == pytest.approx(
            (expected.parameters, expected.gradients), rel=0.01
        )
        assert optimizer - counters == pytest.approx(expected.optimizer, rel=0.01)
        wire = count_sent_bytes(trace, layout)
        traffic = data_traffic(mesh, count_weights(trace, layout), item_bytes=2)
        assert {axis: wire[axis] for axis in traffic} == pytest.approx(traffic)


def test_memory_grows_with_the_micro_batch_and_falls_with_shards() -> None:
    for layout in list_layouts(SMALL, request(16)):
        sizes = [
            predict_memory(SMALL, _with(layout, micro)).total for micro in (1, 2, 4, 8)
        ]
        assert sizes == sorted(sizes), layout.words
    shards = [
        count_rank_bytes(SMALL, Candidate(mesh=MeshSpec(dp_shard=ranks), sharded=True))
        for ranks in (1, 2, 4, 1024)
    ]
    assert shards == sorted(shards, reverse=True)


def _with(layout: Candidate, micro: int) -> Candidate:
    return Candidate(
        mesh=layout.mesh,
        sharded=layout.sharded,
        precision=layout.precision,
        recompute=layout.recompute,
        micro_batch=micro,
        micro_steps=2,
    )


@pytest.fixture(scope="module")
def plans() -> list[LayoutPlan]:
    """A small model on few GPUs and many, and a large one."""
    return [search_layouts(SMALL, request(gpus)) for gpus in (1, 8, 64)] + [
        search_layouts(llama(), request(512))
    ]


def test_the_best_is_the_fastest_that_fits(plans: list[LayoutPlan]) -> None:
    for plan in plans:
        usable = [option for option in plan.options if option.fits]
        assert plan.best in usable
        fastest_s = min(option.time.total for option in usable)
        assert plan.best.time.total <= fastest_s * (1 + 4 * FEATURE_COST)
        assert all(
            option.need.total <= plan.request.accelerator.memory_bytes
            for option in usable
        )
        best = plan.best.time
        assert best.total == pytest.approx(best.compute + best.update + best.exposed)
        assert 0 < best.mfu(plan.request.accelerator, plan.best.candidate) < 1


def test_copies_are_taken_where_shards_gain_next_to_nothing(
    plans: list[LayoutPlan],
) -> None:
    for plan in plans:
        copies = [
            option for option in plan.options if option.fits and _is_plain(option)
        ]
        fastest_s = min(option.time.total for option in plan.options if option.fits)
        if copies and min(option.time.total for option in copies) <= fastest_s * (
            1 + FEATURE_COST
        ):
            assert _is_plain(plan.best)
    assert _is_plain(plans[0].best), "one GPU"


def _is_plain(option: Option) -> bool:
    candidate = option.candidate
    return not (
        candidate.sharded
        or candidate.recompute
        or candidate.offload
        or candidate.mesh.tp > 1
    )


def test_a_plan_for_4096_gpus_takes_seconds() -> None:
    start = time.perf_counter()
    plan = search_layouts(llama(), request(4096))
    assert time.perf_counter() - start < 20
    assert plan.best.candidate.mesh.world_size == 4096
    assert plan.best.candidate.sharded, (
        "70 billion parameters with their optimizer state fit no GPU"
    )


def test_the_best_becomes_settings_that_are_read_back(
    plans: list[LayoutPlan], tmp_path: Path
) -> None:
    for plan in plans:
        config = report.make_config(plan, plan.best)
        path = files.write(config, tmp_path / "config.yaml")
        names = {entry.name for entry in files.read(path).entries}
        assert config.launch.num_processes == plan.request.gpus
        candidate = plan.best.candidate
        assert ("parallelism.dp_shard_size" in names) == candidate.sharded
        assert config.gradient_accumulation.num_steps == candidate.micro_steps
        assert all([report.explain_best(plan), report.list_notes(plan, plan.best)])


def test_copies_are_offered_where_they_fit_and_only_there(
    plans: list[LayoutPlan],
) -> None:
    for plan in plans:
        copies = [
            option
            for option in plan.options
            if option.candidate.strategy in ("none", "ddp")
        ]
        assert any(option.fits for option in copies) == (plan.trace is SMALL)


def test_what_cannot_be_planned_is_said_in_one_sentence() -> None:
    with pytest.raises(
        ConfigError,
        match=r"fits no layout on 2 x l4.*recompute, offload to host memory\).*; use more GPUs",
    ):
        search_layouts(
            llama(),
            PlanRequest(
                gpus=2, accelerator=hardware.find_accelerator("l4"), global_batch=2
            ),
        )
    with pytest.raises(ConfigError, match="global batch 7 cannot be split over 4 GPUs"):
        search_layouts(
            llama(layers=7, width=1000, sequence=1023),
            PlanRequest(
                gpus=4,
                accelerator=hardware.find_accelerator("h100"),
                global_batch=7,
                micro_batch=3,
            ),
        )
    with pytest.raises(ConfigError, match="gpus=0 is not a number to plan for"):
        request(0, batch=1)


def test_accelerators_are_found_by_the_names_people_and_drivers_use(
    tmp_path: Path,
) -> None:
    for name in ("a100", "h100", "h200", "b200", "l4", "rtx4090", "mi300x", "tpu-v5e"):
        assert hardware.find_accelerator(name.upper()).name == name
    assert hardware.find_accelerator("NVIDIA H200").name == "h200"
    assert hardware.find_accelerator("NVIDIA A100-SXM4-40GB").name == "a100-40gb"
    assert hardware.find_accelerator("NVIDIA A100-SXM4-80GB").name == "a100"
    assert hardware.find_accelerator("NVIDIA GeForce RTX 4090").name == "rtx4090"
    with pytest.raises(
        ConfigError, match=r"the accelerator 'hh20' is unknown.*did you mean 'h200'"
    ):
        hardware.find_accelerator("hh20")
    file = tmp_path / "own.yaml"
    file.write_text("mine: {like: h100, memory_gib: 96}\n")
    user_accelerators = hardware.read_entries(file)
    assert hardware.find_accelerator("mine", user_accelerators).memory_gib == 96
    assert (
        hardware.find_accelerator("mine", user_accelerators).tflops_bf16
        == hardware.find_accelerator("h100").tflops_bf16
    )
    for text, expected in (
        ("mine: {memory: 1}", "mine.memory is not a field"),
        ("mine: {memory_gib: big}", "'big' is not a number"),
        ("mine: {memory_gib: 3}", "mine is incomplete"),
        ("- 3", "not a mapping"),
        ("a: [", "cannot be read"),
    ):
        file.write_text(text)
        with pytest.raises(ConfigError, match=expected):
            hardware.read_entries(file)
    with pytest.raises(ConfigError, match="cannot be read"):
        hardware.read_entries(tmp_path / "absent.yaml")


def test_divisors_are_the_micro_batches_offered() -> None:
    micro_batches = {
        option.candidate.micro_batch
        for option in search_layouts(SMALL, request(1, batch=12)).options
    }
    assert micro_batches <= set(divisors(12))
