"""What SLURM, MPI and Kubernetes say about machines, at every size."""

from __future__ import annotations

import pytest

from hasten.errors import ConfigError, TopologyError
from hasten.launch.base import Allocation
from hasten.launch.shape import read_allocation, split_range


def slurm_variables(
    node: int, nodes: int, tasks_per_node: int = 1, local: int = 0
) -> dict[str, str]:
    """The variables of one task of an srun over nodes n0, n1, …"""
    return {
        "SLURM_JOB_ID": "77",
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": str(node * tasks_per_node + local),
        "SLURM_LOCALID": str(local),
        "SLURM_NODEID": str(node),
        "SLURM_NTASKS": str(nodes * tasks_per_node),
        "SLURM_STEP_NUM_TASKS": str(nodes * tasks_per_node),
        "SLURM_STEP_TASKS_PER_NODE": f"{tasks_per_node}(x{nodes})"
        if nodes > 1
        else str(tasks_per_node),
        "SLURM_STEP_NODELIST": f"n[0-{nodes - 1}]" if nodes > 1 else "n0",
    }


def test_nothing_means_one_machine() -> None:
    assert read_allocation({}) == Allocation()
    assert read_allocation({"WORLD_SIZE": "4"}) == Allocation()


def test_one_slurm_task_per_machine_is_a_machine() -> None:
    for nodes in range(2, 17):
        allocations = [
            read_allocation(slurm_variables(node, nodes)) for node in range(nodes)
        ]
        assert [a.machine_rank for a in allocations] == list(range(nodes))
        assert {a.num_machines for a in allocations} == {nodes}
        assert {a.address for a in allocations} == {"n0"}
        assert len({a.port for a in allocations}) == 1
        assert all(a.rank is None for a in allocations)


def test_several_slurm_tasks_per_machine_are_ranks() -> None:
    for nodes in (1, 2, 3):
        for tasks in (2, 4):
            rank_allocations = [
                read_allocation(slurm_variables(n, nodes, tasks, i)).rank
                for n in range(nodes)
                for i in range(tasks)
            ]
            assert [t.rank for t in rank_allocations if t] == list(range(nodes * tasks))
            assert {t.local_world_size for t in rank_allocations if t} == {tasks}


def test_the_batch_script_itself_is_one_machine() -> None:
    assert (
        read_allocation({"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"})
        == Allocation()
    )


def test_openmpi_one_per_machine_or_one_per_rank() -> None:
    names = (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    )
    per_machine = read_allocation(
        {
            **dict(zip(names, "1201", strict=True)),
            "MASTER_ADDR": "head",
            "MASTER_PORT": "5",
        }
    )
    assert (
        per_machine.num_machines,
        per_machine.machine_rank,
        per_machine.address,
        per_machine.port,
    ) == (
        2,
        1,
        "head",
        5,
    )
    per_rank = read_allocation(
        {**dict(zip(names, "3412", strict=True)), "MASTER_ADDR": "head"}
    )
    assert per_rank.rank is not None
    assert (per_rank.rank.rank, per_rank.rank.local_rank) == (3, 1)


def test_mpich_ranks() -> None:
    env = {
        "PMI_RANK": "1",
        "PMI_SIZE": "2",
        "MPI_LOCALRANKID": "1",
        "MPI_LOCALNRANKS": "2",
    }
    rank_allocation = read_allocation(env).rank
    assert rank_allocation is not None
    assert (
        rank_allocation.rank,
        rank_allocation.world_size,
        rank_allocation.rendezvous,
    ) == (
        1,
        2,
        "tcp://127.0.0.1:29500",
    )


def test_pods_are_machines() -> None:
    operator = {
        "PET_NNODES": "2",
        "PET_NODE_RANK": "1",
        "PET_NPROC_PER_NODE": "4",
        "PET_MASTER_ADDR": "job-0",
    }
    allocation = read_allocation({**operator, "PET_MASTER_PORT": "2222"})
    assert (
        allocation.num_machines,
        allocation.machine_rank,
        allocation.per_machine,
        allocation.address,
        allocation.port,
    ) == (
        2,
        1,
        4,
        "job-0",
        2222,
    )
    jobset = {
        "JOB_COMPLETION_INDEX": "1",
        "NNODES": "2",
        "JOBSET_NAME": "run",
        "REPLICATED_JOB_NAME": "node",
    }
    allocation = read_allocation(jobset)
    assert (
        allocation.num_machines,
        allocation.machine_rank,
        allocation.address,
        allocation.port,
    ) == (
        2,
        1,
        "run-node-0-0.run",
        29500,
    )
    elastic = read_allocation({"PET_NNODES": "1:3", "PET_RDZV_ENDPOINT": "job-0:29400"})
    assert (
        elastic.min_machines,
        elastic.num_machines,
        elastic.address,
        elastic.port,
    ) == (1, 3, "job-0", 29400)
    plain = read_allocation(
        {"RANK": "1", "WORLD_SIZE": "3", "MASTER_ADDR": "job-0", "MASTER_PORT": "23456"}
    )
    assert (plain.num_machines, plain.machine_rank, plain.port) == (3, 1, 23456)
    with pytest.raises(TopologyError, match="RANK=3 with WORLD_SIZE=3 is impossible"):
        read_allocation({"RANK": "3", "WORLD_SIZE": "3", "MASTER_ADDR": "job-0"})


def test_a_started_worker_is_no_machine() -> None:
    worker = {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
    }
    assert read_allocation(worker) == Allocation()
    assert read_allocation({**slurm_variables(0, 2), **worker}) == Allocation()


@pytest.mark.parametrize("text", ["", "a", "0", "2:1", "1:x", "-1"])
def test_ranges_that_are_none(text: str) -> None:
    with pytest.raises(ConfigError, match="not a number of machines"):
        split_range(text)


def test_ranges() -> None:
    assert split_range("4") == (4, 4)
    assert split_range("2:4") == (2, 4)


POD = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "job-0"}


@pytest.mark.parametrize(
    ("env", "allocation"),
    [
        (
            POD,
            Allocation(
                source="RANK and WORLD_SIZE",
                num_machines=2,
                min_machines=2,
                machine_rank=0,
                address="job-0",
                port=29500,
            ),
        ),
        (
            {**POD, "NODE_RANK": "2", "NNODES": "3", "MASTER_PORT": "4"},
            Allocation(
                source="NODE_RANK and NNODES",
                num_machines=3,
                min_machines=3,
                machine_rank=2,
                address="job-0",
                port=4,
            ),
        ),
        # one pod, no address, half of a pair, or a word in place of a number
        ({**POD, "WORLD_SIZE": "1"}, Allocation()),
        ({"RANK": "0", "WORLD_SIZE": "2"}, Allocation()),
        ({"NODE_RANK": "0", "MASTER_ADDR": "job-0"}, Allocation()),
        ({"NNODES": "2", "MASTER_ADDR": "job-0"}, Allocation()),
        (
            {"NODE_RANK": "first", "NNODES": "2", "MASTER_ADDR": "job-0"},
            Allocation(),
        ),
        ({**POD, "LOCAL_RANK": "0"}, Allocation()),
        # one machine that does not say how many processes it wants
        ({"PET_NNODES": "1"}, Allocation()),
        ({"PET_NNODES": "1", "PET_NPROC_PER_NODE": "auto"}, Allocation()),
        (
            {"PET_NNODES": "1", "PET_NPROC_PER_NODE": "2"},
            Allocation(source="Kubernetes (PET_*)", port=29500, per_machine=2),
        ),
        (
            {
                "PET_NNODES": "2:4",
                "PET_NPROC_PER_NODE": "auto",
                "JOB_COMPLETION_INDEX": "3",
                "MASTER_ADDR": "job-1",
                "MASTER_PORT": "7",
                "PET_RDZV_ENDPOINT": "job-0:29400",
            },
            Allocation(
                source="Kubernetes (PET_*)",
                num_machines=4,
                min_machines=2,
                machine_rank=3,
                address="job-1",
                port=7,
            ),
        ),
        (
            {
                "PET_NNODES": "2",
                "PET_NODE_RANK": "1",
                "JOB_COMPLETION_INDEX": "9",
                "PET_MASTER_ADDR": "job-2",
                "MASTER_ADDR": "job-1",
                "PET_MASTER_PORT": "8",
                "MASTER_PORT": "7",
            },
            Allocation(
                source="Kubernetes (PET_*)",
                num_machines=2,
                min_machines=2,
                machine_rank=1,
                address="job-2",
                port=8,
            ),
        ),
    ],
)
def test_variables_of_pods(env: dict[str, str], allocation: Allocation) -> None:
    assert read_allocation(env) == allocation


def test_a_slurm_step_of_one_task_is_one_machine() -> None:
    assert read_allocation(slurm_variables(0, 1)) == Allocation()
    with pytest.raises(TopologyError, match="NODE_RANK=2 with NNODES=2 is impossible"):
        read_allocation({**POD, "NODE_RANK": "2", "NNODES": "2"})


def test_an_address_may_have_colons() -> None:
    names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
    task = {
        f"OMPI_COMM_WORLD_{name}": number
        for name, number in zip(names, "1201", strict=True)
    }
    allocation = read_allocation({**task, "MASTER_ADDR": "::1", "MASTER_PORT": "5"})
    assert (allocation.address, allocation.port) == ("::1", 5)
    assert (allocation.source, allocation.min_machines) == ("mpi", 2)
