"""How many machines and processes a launch has: laws over many sizes, and the words of what cannot be."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from hasten.config.root import Config
from hasten.config.sections.launch import LaunchConfig
from hasten.errors import ConfigError
from hasten.launch.base import Allocation, Host, JobShape, LaunchRequest, Target
from hasten.launch.cluster import mpi
from hasten.launch.shape import (
    check_memory,
    decide_shape,
    read_allocation,
    remote_shape,
    worker_argv,
)


def shape_for(
    launch: Mapping[str, Any] | None = None,
    *,
    devices: int = 0,
    cores: int = 8,
    env: Mapping[str, str] | None = None,
    **config: Any,
) -> JobShape:
    """The shape for launch settings on a machine with some devices."""
    device = "cuda" if devices else "cpu"
    host = Host(
        name="here",
        cores=cores,
        device=device,  # type: ignore[arg-type]
        num_devices=devices,
        env=env or {},
    )
    return decide_shape(
        LaunchRequest(
            Config(launch=LaunchConfig(**(launch or {})), **config),
            Target("train.py"),
            "SETTINGS",
        ),
        host,
    )


def test_every_device_gets_a_process_without_asking() -> None:
    for devices in range(1, 17):
        assert shape_for(devices=devices).num_processes == devices


def test_a_cpu_gets_one_process_and_as_many_as_asked() -> None:
    assert shape_for().num_processes == 1
    for count in range(1, 17):
        assert shape_for({"num_processes": count}, cpu=True).num_processes == count
        assert (
            shape_for({"num_processes": count}, cpu=True, devices=2).num_processes
            == count
        )


def test_a_total_is_shared_out_over_machines() -> None:
    for machines in range(1, 9):
        for per_machine in range(1, 9):
            machine_shape = shape_for(
                {
                    "num_processes": machines * per_machine,
                    "num_machines": machines,
                    "machine_rank": machines - 1,
                }
            )
            assert (machine_shape.num_processes, machine_shape.expected_world_size) == (
                per_machine,
                machines * per_machine,
            )


def test_machines_may_bring_different_numbers() -> None:
    machine_shape = shape_for({"processes_per_machine": 3, "num_machines": 2})
    assert (
        machine_shape.num_processes,
        machine_shape.expected_world_size,
        machine_shape.machine_rank,
    ) == (
        3,
        None,
        None,
    )


def test_threads_are_shared_out_and_never_zero() -> None:
    for cores in range(1, 17):
        for count in range(2, 17):
            env = dict(shape_for({"num_processes": count}, cores=cores).env)
            assert int(env["OMP_NUM_THREADS"]) == max(1, cores // count)


def test_threads_of_the_user_stay() -> None:
    assert "OMP_NUM_THREADS" not in dict(
        shape_for({"num_processes": 2}, env={"OMP_NUM_THREADS": "3"}).env
    )
    assert (
        dict(shape_for({"num_processes": 2, "num_cpu_threads_per_process": 5}).env)[
            "OMP_NUM_THREADS"
        ]
        == "5"
    )
    assert "OMP_NUM_THREADS" not in dict(shape_for().env)


def test_chosen_devices_are_the_only_visible_ones() -> None:
    machine_shape = shape_for({"gpu_ids": (1, 3)}, devices=4)
    assert machine_shape.num_processes == 2
    assert dict(machine_shape.env) == {
        "CUDA_VISIBLE_DEVICES": "1,3",
        "HASTEN_CONFIG": "SETTINGS",
        "OMP_NUM_THREADS": "4",
    }


@pytest.mark.parametrize(
    ("launch", "settings", "message"),
    [
        (
            {"num_processes": 4},
            {"devices": 2},
            "4 processes were requested on here, which has 2 usable devices",
        ),
        (
            {"num_processes": 3, "num_machines": 2},
            {},
            "cannot be split evenly over 2 machines",
        ),
        (
            {"num_processes": 2, "processes_per_machine": 3},
            {},
            "contradicts processes_per_machine=3",
        ),
        ({"machine_rank": 1}, {}, "machine_rank=1 with one machine"),
        ({"machine_rank": 2, "num_machines": 2}, {}, "ranks count from 0 to 1"),
        ({"multi_gpu": True}, {}, "no usable accelerator was found on here"),
        (
            {"multi_gpu": True},
            {"cpu": True, "devices": 2},
            "cpu and multi_gpu contradict",
        ),
        ({"gpu_ids": (0, 5)}, {"devices": 2}, r"names \[5\], but here has 2 devices"),
        (
            {"gpu_ids": (0,)},
            {"cpu": True, "devices": 2},
            "cpu and gpu_ids=0 contradict",
        ),
        ({"nnodes": "1:2", "num_processes": 4}, {}, "has no meaning"),
        ({"nnodes": "3:2"}, {}, "min:max such as 2:4"),
        ({"nnodes": "1:2", "num_machines": 3}, {}, "contradicts nnodes"),
    ],
)
def test_contradictions_are_told(
    launch: dict[str, Any], settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        shape_for(launch, **settings)


def test_cluster_and_settings_must_agree_on_machines() -> None:
    pods = {"NODE_RANK": "1", "NNODES": "2", "MASTER_ADDR": "pod-0"}
    assert shape_for(env=pods).max_machines == 2
    assert shape_for({"num_machines": 2}, env=pods).machine_rank == 1
    with pytest.raises(ConfigError, match="started this command on 2 machines"):
        shape_for({"num_machines": 3}, env=pods)


def test_worker_commands() -> None:
    host = Host(python="/usr/bin/python")
    boot = ("/usr/bin/python", "-m", "hasten.launch.worker")
    assert worker_argv(Target("a.py", ("x",)), host) == (*boot, "a.py", "x")
    assert worker_argv(Target("pkg.mod", ("x",), module=True), host) == (
        *boot,
        "-m",
        "pkg.mod",
        "x",
    )
    assert worker_argv(Target("./prog", ("x",), no_python=True), host) == (
        "./prog",
        "x",
    )
    with pytest.raises(ConfigError, match="a module needs Python"):
        worker_argv(Target("x", module=True, no_python=True), host)


GIB = 1024**3


def test_more_processes_than_memory_holds_are_refused() -> None:
    host = Host(name="here", cores=2, memory_bytes=GIB)
    for count, launch in (
        (17, LaunchConfig(num_processes=17)),
        (10**9, LaunchConfig(processes_per_machine=10**9)),
    ):
        with pytest.raises(
            ConfigError,
            match=rf"{count} processes .* 1 GiB is too small.* Request at most 16",
        ):
            decide_shape(LaunchRequest(Config(launch=launch), Target("train.py")), host)
    assert (
        decide_shape(
            LaunchRequest(
                Config(launch=LaunchConfig(num_processes=16)), Target("train.py")
            ),
            host,
        ).num_processes
        == 16
    )
    with pytest.raises(ConfigError, match="is too small"):
        mpi.plan_mpirun(
            LaunchRequest(
                Config(launch=LaunchConfig(num_processes=99)), Target("train.py")
            ),
            host,
        )


def test_devices_that_do_not_exist_are_refused() -> None:
    with pytest.raises(
        ConfigError,
        match=r"gpu_ids=0,99 names devices, but no usable accelerator.*remove gpu_ids",
    ):
        shape_for({"gpu_ids": (0, 99)})
    for wrong in ((0, 99), (-1,), (2,)):
        with pytest.raises(ConfigError, match="has 2 devices"):
            shape_for({"gpu_ids": wrong}, devices=2)


PODS = {"NODE_RANK": "1", "NNODES": "2", "MASTER_ADDR": "pod-0"}
ELASTIC_PODS = {"PET_NNODES": "1:3", "PET_NPROC_PER_NODE": "3"}
SETTINGS = ("HASTEN_CONFIG", "SETTINGS")


@pytest.mark.parametrize(
    ("launch", "settings", "expected"),
    [
        (
            {},
            {"cpu": True, "devices": 4},
            JobShape(
                num_processes=1,
                machine_rank=0,
                env=(SETTINGS,),
                notes=("1 on this machine: the CPU (give num_processes for more)",),
            ),
        ),
        (
            {"num_processes": 4},
            {},
            JobShape(
                num_processes=4,
                machine_rank=0,
                expected_world_size=4,
                env=(SETTINGS, ("OMP_NUM_THREADS", "2")),
                notes=(
                    "4 on this machine: num_processes",
                    "OMP_NUM_THREADS=2: 8 cores / 4 processes",
                ),
            ),
        ),
        (
            {"processes_per_machine": 1, "num_processes": 1},
            {},
            JobShape(
                num_processes=1,
                machine_rank=0,
                expected_world_size=1,
                env=(SETTINGS,),
                notes=("1 on this machine: processes_per_machine",),
            ),
        ),
        (
            {"processes_per_machine": 1, "num_processes": 5, "num_machines": 2},
            {},
            JobShape(
                num_processes=1,
                min_machines=2,
                max_machines=2,
                expected_world_size=5,
                env=(SETTINGS,),
                notes=("1 on this machine: processes_per_machine",),
            ),
        ),
        (
            {"gpu_ids": (0, 2, 3)},
            {"devices": 4},
            JobShape(
                num_processes=3,
                machine_rank=0,
                use_cpu=False,
                env=(
                    ("CUDA_VISIBLE_DEVICES", "0,2,3"),
                    SETTINGS,
                    ("OMP_NUM_THREADS", "2"),
                ),
                notes=(
                    "3 on this machine: one for each device (4 x cuda)",
                    "OMP_NUM_THREADS=2: 8 cores / 3 processes",
                ),
            ),
        ),
        (
            {"num_processes": 2, "num_machines": 2, "machine_rank": 0},
            {"devices": 1},
            JobShape(
                num_processes=1,
                min_machines=2,
                max_machines=2,
                machine_rank=0,
                expected_world_size=2,
                use_cpu=False,
                env=(SETTINGS,),
                notes=("1 on this machine: 2 / 2 machines",),
            ),
        ),
        (
            {"nnodes": "2:4", "machine_rank": 3},
            {"devices": 1},
            JobShape(
                num_processes=1,
                min_machines=2,
                max_machines=4,
                machine_rank=3,
                use_cpu=False,
                env=(SETTINGS,),
                notes=("1 on this machine: one for each device (1 x cuda)",),
            ),
        ),
        (
            {"nnodes": "2", "num_machines": 1, "num_processes": 2},
            {"devices": 1},
            JobShape(
                num_processes=1,
                min_machines=2,
                max_machines=2,
                expected_world_size=2,
                use_cpu=False,
                env=(SETTINGS,),
                notes=("1 on this machine: 2 / 2 machines",),
            ),
        ),
        (
            {"num_machines": 1},
            {"env": PODS},
            JobShape(
                num_processes=1,
                min_machines=2,
                max_machines=2,
                machine_rank=1,
                env=(SETTINGS,),
                notes=(
                    "NODE_RANK and NNODES says: 2 machines, this is 1",
                    "1 on this machine: the CPU (give num_processes for more)",
                ),
                allocation=Allocation(
                    source="NODE_RANK and NNODES",
                    num_machines=2,
                    min_machines=2,
                    machine_rank=1,
                    address="pod-0",
                    port=29500,
                ),
            ),
        ),
        (
            {},
            {"env": ELASTIC_PODS},
            JobShape(
                num_processes=3,
                min_machines=1,
                max_machines=3,
                env=(SETTINGS, ("OMP_NUM_THREADS", "2")),
                notes=(
                    "Kubernetes (PET_*) says: 1 to 3 machines, this is one of them",
                    "3 on this machine: Kubernetes (PET_*)",
                    "OMP_NUM_THREADS=2: 8 cores / 3 processes",
                ),
                allocation=Allocation(
                    source="Kubernetes (PET_*)",
                    num_machines=3,
                    min_machines=1,
                    port=29500,
                    per_machine=3,
                ),
            ),
        ),
    ],
)
def test_shapes(
    launch: dict[str, Any], settings: dict[str, Any], expected: JobShape
) -> None:
    assert shape_for(launch, **settings) == expected


def test_a_rank_of_a_cluster_is_told_so() -> None:
    ranks = {
        "PMI_RANK": "1",
        "PMI_SIZE": "2",
        "MPI_LOCALRANKID": "1",
        "MPI_LOCALNRANKS": "2",
    }
    rank_shape = shape_for(env=ranks)
    assert rank_shape.notes[0] == "mpi says: this is rank 1 of 2"
    assert rank_shape.allocation == read_allocation(ranks)


def test_settings_that_fit_are_taken() -> None:
    # the number of machines twice, or of one machine alone
    assert shape_for({"nnodes": "1:3", "num_machines": 3}).max_machines == 3
    assert shape_for({"machine_rank": 0}).machine_rank == 0
    assert shape_for({"num_machines": 2, "machine_rank": 1}).machine_rank == 1
    # the setting wins over the cluster, whose rank counts otherwise
    assert shape_for({"num_machines": 2, "machine_rank": 0}, env=PODS).machine_rank == 0
    assert shape_for({"multi_gpu": True}, devices=1).num_processes == 1
    assert shape_for({"num_processes": 2}, devices=2).num_processes == 2
    assert (
        shape_for({"gpu_ids": (0,), "num_processes": 1}, devices=2).num_processes == 1
    )
    # with some devices hidden the ids are those of the machine
    hidden = {"CUDA_VISIBLE_DEVICES": "4,5"}
    assert shape_for({"gpu_ids": (5,)}, devices=2, env=hidden).num_processes == 1
    with pytest.raises(ConfigError, match="which has 1 usable devices"):
        shape_for({"gpu_ids": (1,), "num_processes": 2}, devices=2)
    with pytest.raises(ConfigError, match="which has 1 usable devices"):
        shape_for({"processes_per_machine": 2}, devices=1)


def test_a_cpu_is_asked_for_or_all_there_is() -> None:
    assert shape_for(devices=1).use_cpu is False
    assert shape_for(devices=1, cpu=True).use_cpu is True
    assert shape_for().use_cpu is True
    # ids of devices are not passed on to processes on the CPU
    with pytest.raises(ConfigError, match=r"gpu_ids=0,1 contradict"):
        shape_for({"gpu_ids": (0, 1)}, cpu=True, devices=2)


def test_memory_limits_processes_where_it_is_known() -> None:
    small = Host(cores=2, memory_bytes=640 * 1024**2)
    check_memory(small, 10)
    with pytest.raises(ConfigError, match=r"0\.625 GiB .* 64 MiB\. Request at most 10"):
        check_memory(small, 11)
    # a core always has a process
    check_memory(Host(cores=64, memory_bytes=1), 64)
    with pytest.raises(ConfigError, match="Request at most 64"):
        check_memory(Host(cores=64, memory_bytes=1), 65)
    check_memory(Host(cores=1), 10**6)


@pytest.mark.parametrize(
    ("per_machine", "settings", "env", "variables", "notes"),
    [
        (None, {}, {}, {"HASTEN_CONFIG": "SETTINGS"}, ()),
        (1, {}, {}, {"HASTEN_CONFIG": "SETTINGS"}, ()),
        (
            3,
            {},
            {},
            {"HASTEN_CONFIG": "SETTINGS", "OMP_NUM_THREADS": "2"},
            ("OMP_NUM_THREADS=2: 8 cores / 3 processes",),
        ),
        (3, {}, {"OMP_NUM_THREADS": "1"}, {"HASTEN_CONFIG": "SETTINGS"}, ()),
        (
            3,
            {"num_cpu_threads_per_process": 7},
            {"OMP_NUM_THREADS": "1"},
            {"HASTEN_CONFIG": "SETTINGS", "OMP_NUM_THREADS": "7"},
            (),
        ),
    ],
)
def test_shapes_of_other_launchers(
    per_machine: int | None,
    settings: dict[str, Any],
    env: dict[str, str],
    variables: dict[str, str],
    notes: tuple[str, ...],
) -> None:
    request = LaunchRequest(
        Config(launch=LaunchConfig(**settings)), Target("train.py"), "SETTINGS"
    )
    assert remote_shape(request, Host(cores=8, env=env), per_machine) == JobShape(
        num_processes=per_machine or 1, env=tuple(variables.items()), notes=notes
    )
    bare_request = LaunchRequest(Config(), Target("train.py"))
    assert remote_shape(bare_request, Host(), None).env == ()
    assert decide_shape(bare_request, Host()).env == ()
