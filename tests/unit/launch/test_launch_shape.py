"""How many machines and processes a launch has: laws over many sizes, and the words of what cannot be."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from hasten.config.root import Config
from hasten.config.sections.launch import LaunchConfig
from hasten.errors import ConfigError
from hasten.launch.base import Host, JobShape, LaunchRequest, Target
from hasten.launch.cluster import mpi
from hasten.launch.shape import decide_shape, worker_argv


def shape(
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
        assert shape(devices=devices).num_processes == devices


def test_a_cpu_gets_one_process_and_as_many_as_asked() -> None:
    assert shape().num_processes == 1
    for count in range(1, 17):
        assert shape({"num_processes": count}, cpu=True).num_processes == count
        assert (
            shape({"num_processes": count}, cpu=True, devices=2).num_processes == count
        )


def test_a_total_is_shared_out_over_machines() -> None:
    for machines in range(1, 9):
        for each in range(1, 9):
            machine_shape = shape(
                {
                    "num_processes": machines * each,
                    "num_machines": machines,
                    "machine_rank": machines - 1,
                }
            )
            assert (machine_shape.num_processes, machine_shape.expected_world_size) == (
                each,
                machines * each,
            )


def test_machines_may_bring_different_numbers() -> None:
    machine_shape = shape({"processes_per_machine": 3, "num_machines": 2})
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
            env = dict(shape({"num_processes": count}, cores=cores).env)
            assert int(env["OMP_NUM_THREADS"]) == max(1, cores // count)


def test_threads_of_the_user_stay() -> None:
    assert "OMP_NUM_THREADS" not in dict(
        shape({"num_processes": 2}, env={"OMP_NUM_THREADS": "3"}).env
    )
    assert (
        dict(shape({"num_processes": 2, "num_cpu_threads_per_process": 5}).env)[
            "OMP_NUM_THREADS"
        ]
        == "5"
    )
    assert "OMP_NUM_THREADS" not in dict(shape().env)


def test_chosen_devices_are_the_only_visible_ones() -> None:
    machine_shape = shape({"gpu_ids": (1, 3)}, devices=4)
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
        shape(launch, **settings)


def test_cluster_and_settings_must_agree_on_machines() -> None:
    pods = {"NODE_RANK": "1", "NNODES": "2", "MASTER_ADDR": "pod-0"}
    assert shape(env=pods).max_machines == 2
    assert shape({"num_machines": 2}, env=pods).machine_rank == 1
    with pytest.raises(ConfigError, match="started this command on 2 machines"):
        shape({"num_machines": 3}, env=pods)


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
        shape({"gpu_ids": (0, 99)})
    for wrong in ((0, 99), (-1,)):
        with pytest.raises(ConfigError, match="has 2 devices"):
            shape({"gpu_ids": wrong}, devices=2)
