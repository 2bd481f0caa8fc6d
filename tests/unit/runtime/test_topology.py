"""Topology parsed from every launcher's variables, and the errors of variables that cannot be."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping

import pytest

from hasten.errors import TopologyError
from hasten.runtime.nodelist import expand_tasks, first_host
from hasten.runtime.topology import Topology

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29400",
    "TORCHELASTIC_RESTART_COUNT": "2",
}
SLURM = {
    "SLURM_JOB_ID": "4242",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "6",
    "SLURM_LOCALID": "2",
    "SLURM_NODEID": "1",
    "SLURM_NTASKS": "9",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2),1",
    "SLURM_STEP_NODELIST": "node[001-003]",
}
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_NODE_RANK": "1",
    "MASTER_ADDR": "head",
}
HYDRA = {
    "PMI_RANK": "3",
    "PMI_SIZE": "4",
    "MPI_LOCALRANKID": "1",
    "MPI_LOCALNRANKS": "2",
    "MASTER_ADDR": "head",
}
CRAY = {
    "PMI_RANK": "3",
    "PMI_SIZE": "4",
    "PMI_LOCAL_RANK": "1",
    "PMI_LOCAL_SIZE": "2",
    "MASTER_ADDR": "head",
}
POD = {
    "RANK": "2",
    "WORLD_SIZE": "3",
    "MASTER_ADDR": "job-master-0",
    "MASTER_PORT": "23456",
    "KUBERNETES_SERVICE_HOST": "10.1.0.1",
}
PET = {
    "PET_NNODES": "2",
    "PET_NPROC_PER_NODE": "1",
    "PET_NODE_RANK": "1",
    "PET_MASTER_ADDR": "job-0-0.job",
    "PET_MASTER_PORT": "29400",
    "KUBERNETES_SERVICE_HOST": "10.1.0.1",
}
TPU = {
    "PJRT_DEVICE": "TPU",
    "TPU_WORKER_ID": "1",
    "TPU_WORKER_HOSTNAMES": "t-0,t-1",
    "PJRT_LOCAL_PROCESS_RANK": "2",
    "PJRT_LOCAL_PROCESS_COUNT": "4",
}
INDEXED = {
    "JOB_COMPLETION_INDEX": "2",
    "NNODES": "3",
    "JOBSET_NAME": "run",
    "REPLICATED_JOB_NAME": "node",
    "JOBSET_RESTART_ATTEMPT": "1",
}

EVERY = {
    "torchrun": TORCHRUN, "slurm": SLURM, "openmpi": OPENMPI, "hydra": HYDRA, "cray": CRAY,
    "pod": POD, "pet": PET, "jobset": INDEXED, "tpu": TPU,
}  # fmt: skip


def without_variables(env: Mapping[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in env.items() if name not in names}


def test_nothing_set_is_one_process() -> None:
    assert Topology.from_env({}) == Topology()
    assert Topology.from_env({"WORLD_SIZE": "8"}) == Topology(), (
        "a size without a rank says nothing about this process"
    )
    assert Topology.from_env({"LOCAL_RANK": "-1"}) == Topology(), (
        "scripts for several processes say so that there is one"
    )


def test_torchrun() -> None:
    assert Topology.from_env(TORCHRUN) == Topology(
        rank=5,
        world_size=8,
        local_rank=1,
        local_world_size=4,
        node_rank=1,
        rendezvous="tcp://10.0.0.1:29400",
        source="torch",
        restart_count=2,
    )


def test_torchrun_inside_slurm_or_mpi_is_torchrun() -> None:
    mixed = {**SLURM, **OPENMPI, **PET, **TORCHRUN}
    assert Topology.from_env(mixed) == Topology.from_env(TORCHRUN)


def test_torch_variables_set_by_hand() -> None:
    env = {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "1",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "1234",
    }
    topology = Topology.from_env(env)
    assert (topology.local_world_size, topology.node_rank, topology.rendezvous) == (
        2,
        0,
        "tcp://localhost:1234",
    )
    assert (
        Topology.from_env({**env, "MASTER_ADDR": "::1"}).rendezvous
        == "tcp://[::1]:1234"
    )
    by_hand = Topology.from_env(without_variables(env, "LOCAL_RANK"))
    assert (by_hand.local_rank, by_hand.local_world_size, by_hand.source) == (
        1,
        2,
        "torch",
    )
    far = {**env, "MASTER_ADDR": "head"}
    assert (
        Topology.from_env({**far, "NNODES": "2", "LOCAL_RANK": "0"}).local_world_size
        == 1
    )
    with pytest.raises(
        TopologyError,
        match=r"LOCAL_RANK=1 are set, but nothing says.*Export LOCAL_WORLD_SIZE",
    ):
        Topology.from_env(far)


def test_a_pod_of_a_jobset_needs_its_index_the_number_of_pods_and_its_labels() -> None:
    expected = Topology(
        rank=2,
        world_size=3,
        node_rank=2,
        rendezvous="tcp://run-node-0-0.run:29500",
        source="kubernetes",
        restart_count=1,
    )
    assert Topology.from_env(INDEXED) == expected
    counted = {name: value for name, value in INDEXED.items() if name != "NNODES"}
    assert Topology.from_env({**counted, "WORLD_SIZE": "3"}) == expected
    assert (
        Topology.from_env(
            {**INDEXED, "MASTER_ADDR": "a", "MASTER_PORT": "5000"}
        ).rendezvous
        == "tcp://a:5000"
    )
    torchrun = {**counted, "PET_NNODES": "3", "PET_NPROC_PER_NODE": "1"}
    assert Topology.from_env(torchrun) == expected
    with pytest.raises(
        TopologyError, match=r"rank=3 with world_size=3.*kubernetes variables"
    ):
        Topology.from_env({**INDEXED, "JOB_COMPLETION_INDEX": "3"})


def test_an_indexed_job_of_independent_tasks_is_no_training_over_pods() -> None:
    assert Topology.from_env({"JOB_COMPLETION_INDEX": "2"}) == Topology()
    assert (
        Topology.from_env({"JOB_COMPLETION_INDEX": "2", "JOBSET_NAME": "run"})
        == Topology()
    )


def test_kubernetes_torch_operator() -> None:
    assert Topology.from_env(POD) == Topology(
        rank=2,
        world_size=3,
        local_rank=0,
        local_world_size=1,
        node_rank=2,
        rendezvous="tcp://job-master-0:23456",
        source="kubernetes",
        note="RANK is set without LOCAL_RANK: one process on each node",
    )
    master = Topology.from_env({**POD, "RANK": "0", "MASTER_ADDR": "localhost"})
    assert (master.local_rank, master.local_world_size) == (0, 1), (
        "the operator's master pod sees itself as localhost"
    )
    with pytest.raises(
        TopologyError, match=r"PET_NPROC_PER_NODE='4' asks for several.*torchrun"
    ):
        Topology.from_env({**POD, "PET_NPROC_PER_NODE": "4"})


def test_pet_variables_without_torchrun() -> None:
    assert Topology.from_env(PET) == Topology(
        rank=1,
        world_size=2,
        node_rank=1,
        rendezvous="tcp://job-0-0.job:29400",
        source="kubernetes",
    )
    assert (
        Topology.from_env({"PET_NNODES": "1", "PET_NPROC_PER_NODE": "auto"})
        == Topology()
    )
    for bad in (
        {"PET_NNODES": "1:4"},
        {"PET_NPROC_PER_NODE": "8"},
        {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "gpu"},
    ):
        with pytest.raises(TopologyError, match=r"RANK is not set.*hasten launch"):
            Topology.from_env(bad)


def test_slurm() -> None:
    topology = Topology.from_env(SLURM)
    assert (
        topology.rank,
        topology.world_size,
        topology.local_rank,
        topology.local_world_size,
    ) == (
        6,
        9,
        2,
        4,
    )
    assert (topology.node_rank, topology.source) == (1, "slurm")
    assert topology.rendezvous is not None
    host, _, port = topology.rendezvous.removeprefix("tcp://").rpartition(":")
    assert host == "node001"
    assert 12000 <= int(port) < 32000
    second_step = Topology.from_env({**SLURM, "SLURM_STEP_ID": "1"})
    assert second_step.rendezvous != topology.rendezvous, (
        "two steps of one job do not meet by accident"
    )
    last = {**SLURM, "SLURM_PROCID": "8", "SLURM_NODEID": "2", "SLURM_LOCALID": "0"}
    assert Topology.from_env(last).local_world_size == 1
    explicit = Topology.from_env({**SLURM, "MASTER_ADDR": "x", "MASTER_PORT": "5000"})
    assert explicit.rendezvous == "tcp://x:5000"


def test_slurm_uses_the_steps_size_not_the_jobs() -> None:
    env = {**SLURM, "SLURM_NTASKS": "64", "SLURM_STEP_NUM_TASKS": "9"}
    assert Topology.from_env(env).world_size == 9
    bare = without_variables(
        {**SLURM, "SLURM_NTASKS": "8", "SLURM_NNODES": "2"}, "SLURM_STEP_TASKS_PER_NODE"
    )
    assert Topology.from_env(bare).local_world_size == 4


def test_batch_script_of_slurm_is_one_process() -> None:
    topology = Topology.from_env(
        {**without_variables(SLURM, "SLURM_STEP_ID"), "SLURM_PROCID": "0"}
    )
    assert (topology.rank, topology.world_size) == (0, 1)
    assert "SLURM_NTASKS=9, but srun did not start this process" in topology.note


@pytest.mark.parametrize("env", [OPENMPI, HYDRA, CRAY])
def test_mpi(env: dict[str, str]) -> None:
    expected = Topology(
        rank=3,
        world_size=4,
        local_rank=1,
        local_world_size=2,
        node_rank=1,
        rendezvous="tcp://head:29500",
        source="mpi",
    )
    assert Topology.from_env(env) == expected
    assert Topology.from_env({**SLURM, **env}) == expected, (
        "srun started the daemon, mpirun the worker"
    )
    assert Topology.from_env(without_variables(env, "MASTER_ADDR")).rendezvous is None


def test_mpi_on_one_machine_needs_no_address() -> None:
    env = {
        **without_variables(HYDRA, "MASTER_ADDR"),
        "MPI_LOCALRANKID": "3",
        "MPI_LOCALNRANKS": "4",
    }
    assert Topology.from_env(env).meeting_point() == "tcp://127.0.0.1:29500"


def test_meeting_point_is_required_of_several_processes() -> None:
    with pytest.raises(TopologyError, match="Export MASTER_ADDR"):
        Topology.from_env(without_variables(HYDRA, "MASTER_ADDR")).meeting_point()


def test_pmi_without_local_rank() -> None:
    assert Topology.from_env({"PMI_RANK": "0", "PMI_SIZE": "1"}).world_size == 1
    with pytest.raises(
        TopologyError, match=r"PMI_RANK=1 and PMI_SIZE=2.*MPI_LOCALRANKID"
    ):
        Topology.from_env({"PMI_RANK": "1", "PMI_SIZE": "2"})
    srun = {**SLURM, "PMI_RANK": "6", "PMI_SIZE": "9"}
    assert Topology.from_env(srun).source == "slurm", (
        "srun --mpi=pmi2 sets both and knows more"
    )


def test_xla() -> None:
    assert Topology.from_env(TPU) == Topology(
        rank=6,
        world_size=8,
        local_rank=2,
        local_world_size=4,
        node_rank=1,
        rendezvous="xla://",
        source="xla",
    )
    assert Topology.from_env({"PJRT_DEVICE": "CPU"}).world_size == 1
    with pytest.raises(
        TopologyError, match="TPU_WORKER_ID=5 contradicts TPU_WORKER_HOSTNAMES=t-0,t-1"
    ):
        Topology.from_env({**TPU, "TPU_WORKER_ID": "5"})


def numeric_names() -> list[tuple[str, str]]:
    return [
        (kind, name)
        for kind, env in EVERY.items()
        for name, value in env.items()
        if value.isdigit()
    ]


@pytest.mark.parametrize(("kind", "name"), numeric_names())
def test_words_where_numbers_belong_are_named(kind: str, name: str) -> None:
    """Every numeric variable that is read, in every launcher's environment, refuses a word, a sign and a fraction."""
    unread = {"OMPI_COMM_WORLD_NODE_RANK"}
    if name in unread:
        return
    for value in ("two", "-1", "1.5", ""):
        env = {**EVERY[kind], name: value}
        if name in ("PET_NNODES", "PET_NPROC_PER_NODE"):
            with pytest.raises(TopologyError, match=name):
                Topology.from_env(env)
            continue
        with pytest.raises(
            TopologyError, match=f"{name}={value!r} is not a whole number"
        ):
            Topology.from_env(env)


@pytest.mark.parametrize(
    ("env", "match"),
    [
        (
            {**TORCHRUN, "RANK": "8"},
            "rank=8 with world_size=8 is impossible .read from torch variables",
        ),
        (
            {**TORCHRUN, "LOCAL_RANK": "4"},
            "local_rank=4 with local_world_size=4.*torch variables",
        ),
        ({**TORCHRUN, "WORLD_SIZE": "0"}, "world_size=0 is impossible"),
        (
            {**TORCHRUN, "RANK": "1", "WORLD_SIZE": "2"},
            "local_world_size=4 exceeds world_size=2",
        ),
        (
            {**TORCHRUN, "GROUP_RANK": "2"},
            "GROUP_RANK=2 contradicts GROUP_WORLD_SIZE=2",
        ),
        (
            without_variables(TORCHRUN, "WORLD_SIZE"),
            "RANK=5 is set but WORLD_SIZE is not.*unset RANK to run alone",
        ),
        (without_variables(TORCHRUN, "RANK"), "LOCAL_RANK=1 is set but RANK is not"),
        ({**TORCHRUN, "MASTER_PORT": "70000"}, "MASTER_PORT=70000 is not a port"),
        (
            {**SLURM, "SLURM_PROCID": "9"},
            "rank=9 with world_size=9.*slurm variables",
        ),
        ({**SLURM, "SLURM_LOCALID": "4"}, "local_rank=4.*slurm variables"),
        (
            {**SLURM, "SLURM_NODEID": "3"},
            "SLURM_NODEID=3.*contradict SLURM_STEP_TASKS_PER_NODE",
        ),
        (
            {**SLURM, "SLURM_NTASKS": "8"},
            "8 tasks contradict SLURM_STEP_TASKS_PER_NODE='4.x2.,1'",
        ),
        (
            {**SLURM, "SLURM_STEP_TASKS_PER_NODE": "4x2"},
            "SLURM_STEP_TASKS_PER_NODE='4x2' cannot be read",
        ),
        (
            {**SLURM, "SLURM_STEP_NODELIST": "node[1-"},
            r"SLURM_STEP_NODELIST='node\[1-' cannot be read.*MASTER_ADDR",
        ),
        (
            without_variables(SLURM, "SLURM_NTASKS"),
            "SLURM_PROCID=6 is set but SLURM_NTASKS is not",
        ),
        (
            without_variables(SLURM, "SLURM_LOCALID"),
            "SLURM_PROCID=6 is set but SLURM_LOCALID is not",
        ),
        (
            {**OPENMPI, "OMPI_COMM_WORLD_RANK": "4"},
            "rank=4 with world_size=4.*mpi variables",
        ),
        (
            without_variables(OPENMPI, "OMPI_COMM_WORLD_SIZE"),
            "OMPI_COMM_WORLD_SIZE is not",
        ),
        (
            without_variables(OPENMPI, "OMPI_COMM_WORLD_LOCAL_SIZE"),
            "OMPI_COMM_WORLD_LOCAL_RANK=1 is set but OMPI_COMM_WORLD_LOCAL_SIZE is not",
        ),
        (
            {**PET, "PET_NODE_RANK": "2"},
            "rank=2 with world_size=2.*kubernetes variables",
        ),
        ({**TPU, "PJRT_LOCAL_PROCESS_RANK": "4"}, "local_rank=4|rank=8"),
    ],
)
def test_contradictions_name_the_variables(env: dict[str, str], match: str) -> None:
    with pytest.raises(TopologyError, match=match):
        Topology.from_env(env)


@pytest.mark.parametrize("per_node", [1, 2, 4, 8])
@pytest.mark.parametrize("nodes", [1, 2, 3])
def test_every_launcher_gives_a_job_the_same_ranks(nodes: int, per_node: int) -> None:
    """The law: however a job is started, its ranks are each there once and agree about the world."""
    world = nodes * per_node
    for kind in ("torch", "slurm", "mpi", "xla"):
        topologies = [
            Topology.from_env(launched_variables(kind, rank, per_node, nodes))
            for rank in range(world)
        ]
        assert [t.rank for t in topologies] == list(range(world))
        assert {(t.world_size, t.local_world_size, t.source) for t in topologies} == {
            (world, per_node, kind)
        }
        assert sorted((t.node_rank, t.local_rank) for t in topologies) == [
            (n, p) for n in range(nodes) for p in range(per_node)
        ]
        assert len({t.rendezvous for t in topologies}) == 1
        assert [t.is_main for t in topologies].count(True) == 1
        assert [t.is_local_main for t in topologies].count(True) == nodes


def launched_variables(
    kind: str, rank: int, per_node: int, nodes: int
) -> dict[str, str]:
    node, local = divmod(rank, per_node)
    numbers = {
        "torch": {
            "RANK": rank,
            "WORLD_SIZE": per_node * nodes,
            "LOCAL_RANK": local,
            "LOCAL_WORLD_SIZE": per_node,
        },
        "slurm": {
            "SLURM_PROCID": rank,
            "SLURM_NTASKS": per_node * nodes,
            "SLURM_LOCALID": local,
            "SLURM_NODEID": node,
        },
        "mpi": {
            "PMI_RANK": rank,
            "PMI_SIZE": per_node * nodes,
            "MPI_LOCALRANKID": local,
            "MPI_LOCALNRANKS": per_node,
        },
        "xla": {
            "TPU_WORKER_ID": node,
            "PJRT_LOCAL_PROCESS_RANK": local,
            "PJRT_LOCAL_PROCESS_COUNT": per_node,
        },
    }[kind]
    words = {
        "torch": {"MASTER_ADDR": "h0"},
        "slurm": {
            "SLURM_STEP_ID": "0",
            "SLURM_STEP_TASKS_PER_NODE": f"{per_node}(x{nodes})",
            "SLURM_STEP_NODELIST": f"h[0-{nodes - 1}]",
        },
        "mpi": {"MASTER_ADDR": "h0"},
        "xla": {
            "PJRT_DEVICE": "TPU",
            "TPU_WORKER_HOSTNAMES": ",".join(f"h{n}" for n in range(nodes)),
        },
    }[kind]
    return {**{name: str(value) for name, value in numbers.items()}, **words}


@pytest.mark.parametrize(
    ("text", "host"),
    [
        ("node1", "node1"),
        ("node[001-003,7]", "node001"),
        ("a[1-2],b,c[09-10]", "a1"),
        ("r[1-2]n[1-2]", "r1n1"),
        ("gpu-[1,3]-x.cluster.org", "gpu-1-x.cluster.org"),
        ("a, b", "a"),
    ],
)
def test_the_first_host_of_a_node_list(text: str, host: str) -> None:
    assert first_host(text) == host


@pytest.mark.parametrize("text", ["", "a[1-2", "a]1[", "a[[1]]", "a[x]", "a[]", "a b"])
def test_malformed_node_lists(text: str) -> None:
    with pytest.raises(ValueError, match="does not begin with a host name"):
        first_host(text)


def test_task_counts() -> None:
    assert expand_tasks("2(x3),1") == [2, 2, 2, 1]
    assert expand_tasks("4") == [4]
    with pytest.raises(ValueError, match="'2x3' is not a task count"):
        expand_tasks("2x3")


def test_pure_rooms_load_no_torch() -> None:
    code = (
        "import sys, hasten.runtime.topology, hasten.runtime.mesh_plan, hasten.runtime.env, hasten.runtime.affinity;"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
