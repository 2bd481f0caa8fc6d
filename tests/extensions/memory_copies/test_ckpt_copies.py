"""Which copy in memory all machines go on from: always the newest whole one, whoever holds it, and nothing else."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from hasten import Accelerator, Trainer, TrainingArguments
from hasten.comm.local import LocalComm
from hasten.errors import ConfigError, StepError
from hasten.extensions.memory_copies.memory_folder import (
    MemoryCopy,
    explain_loss,
    group_by_folder,
    neighbour_of,
    newest_common,
)
from hasten.extensions.memory_copies.part import memory_root
from hasten.runtime import env
from hasten.runtime.context import ProcessContext
from hasten.runtime.mesh_plan import MeshSpec
from hasten.runtime.topology import Topology


def machines(count: int, each: int) -> list[tuple[int, ...]]:
    return [tuple(range(i * each, (i + 1) * each)) for i in range(count)]


def after_copy(
    layout: list[tuple[int, ...]], steps: list[int]
) -> list[set[MemoryCopy]]:
    """What every machine holds when the states of these steps are copied everywhere."""
    world = sum(map(len, layout))
    copies_by_machine: list[set[MemoryCopy]] = [set() for _ in layout]
    for machine, ranks in enumerate(layout):
        for step in steps:
            copies_by_machine[machine].add(MemoryCopy(ranks, world, step))
            copies_by_machine[neighbour_of(machine, len(layout))].add(
                MemoryCopy(ranks, world, step)
            )
    return copies_by_machine


@pytest.mark.parametrize("count", [2, 3, 4, 7, 16])
@pytest.mark.parametrize("each", [1, 8])
def test_any_one_machine_may_be_lost(count: int, each: int) -> None:
    layout = machines(count, each)
    for lost in range(count):
        copies_by_machine = after_copy(layout, [4, 5])
        copies_by_machine[lost] = set()
        choice = newest_common(copies_by_machine, layout)
        assert choice is not None
        assert choice.step == 5
        assert choice.sources == tuple(
            neighbour_of(i, count) if i == lost else i for i in range(count)
        )


@pytest.mark.parametrize("count", range(2, 8))
def test_two_machines_may_be_lost_unless_one_kept_the_other(count: int) -> None:
    layout = machines(count, 2)
    for pair in itertools.combinations(range(count), 2):
        copies_by_machine = [
            set() if i in pair else copies
            for i, copies in enumerate(after_copy(layout, [9]))
        ]
        a, b = pair
        beside = neighbour_of(a, count) == b or neighbour_of(b, count) == a
        assert (newest_common(copies_by_machine, layout) is None) == beside
        if beside:
            assert (
                "no machine holds the state that machine"
                in explain_loss(copies_by_machine, layout)
                or count == 2
            )


def test_a_copy_that_is_not_everywhere_does_not_count() -> None:
    """Killed in the middle of copying step 6: some machines have it, some neighbours too."""
    layout = machines(3, 1)
    complete = after_copy(layout, [5])
    newer = [(m, MemoryCopy(ranks, 3, 6)) for m, ranks in enumerate(layout)] + [
        (neighbour_of(m, 3), MemoryCopy(ranks, 3, 6)) for m, ranks in enumerate(layout)
    ]
    for size in range(len(newer) + 1):
        for arrived in itertools.combinations(newer, size):
            copies_by_machine = [
                copies | {copy for machine, copy in arrived if machine == i}
                for i, copies in enumerate(complete)
            ]
            choice = newest_common(copies_by_machine, layout)
            assert choice is not None
            assert choice.step == (
                6 if {copy.ranks for _, copy in arrived} == set(layout) else 5
            )
            for machine, source in enumerate(choice.sources):
                assert (
                    MemoryCopy(layout[machine], 3, choice.step)
                    in copies_by_machine[source]
                )


def test_another_layout_is_not_taken_for_this_one() -> None:
    copies_by_machine = after_copy(machines(2, 2), [3])
    for other_layout in (machines(2, 1), machines(4, 1), [(0, 1, 2), (3,)]):
        grown = [
            copies_by_machine[i] if i < 2 else set() for i in range(len(other_layout))
        ]
        assert newest_common(grown, other_layout) is None
        assert "in another layout" in explain_loss(grown, other_layout)
    assert (
        explain_loss([set(), set()], machines(2, 1)) == "no machine holds a copy of it"
    )


def test_machines_that_swap_their_ranks_swap_their_states() -> None:
    layout = machines(2, 2)
    swapped = list(reversed(after_copy(layout, [3])))
    choice = newest_common(swapped, layout)
    assert choice is not None
    for machine, source in enumerate(choice.sources):
        assert MemoryCopy(layout[machine], 4, 3) in swapped[source]


def test_ranks_are_grouped_by_their_folder() -> None:
    assert group_by_folder(["a", "a", "b", "b"]) == [(0, 1), (2, 3)]
    assert group_by_folder(["x"]) == [(0,)]


def context(mesh: MeshSpec | None = None) -> ProcessContext:
    comm = LocalComm()
    return ProcessContext(
        Topology(), mesh or MeshSpec.flat(1), comm.device, comm, lambda *axes: comm
    )


def test_what_would_not_help_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv(env.MEMORY_FOLDER, raising=False)
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    with pytest.raises(ConfigError, match="not started by `hasten launch`"):
        memory_root(context(), 1)
    monkeypatch.setenv(env.MEMORY_FOLDER, str(tmp_path))
    assert memory_root(context(), 1) == tmp_path
    with pytest.raises(ConfigError, match="pipeline"):
        memory_root(context(MeshSpec(pp=2)), 1)
    accelerator = Accelerator(cpu=True, checkpoint_in_memory=1)
    with pytest.raises(StepError, match="all ranks make the copies together"):
        accelerator.join_uneven_inputs([])
    monkeypatch.setenv("HASTEN_CHECKPOINT_IN_MEMORY", "1")
    with pytest.raises(ConfigError, match="set save_steps"):
        Trainer(
            torch.nn.Linear(1, 1),
            TrainingArguments(output_dir=str(tmp_path / "out"), use_cpu=True),
        )
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "0")
    with pytest.raises(ConfigError, match="--max_restarts N"):
        memory_root(context(), 1)
