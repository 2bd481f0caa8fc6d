"""Plans of `hasten launch --ray`, the settings it refuses, and the words for a rank whose actor died; ray is not needed."""

from __future__ import annotations

import json
from typing import Any

import pytest

from hasten.config.resolve import resolve
from hasten.config.root import Config
from hasten.errors import CheckpointError, ConfigError, DeviceError, MissingPackageError
from hasten.extensions.ray import in_worker as public
from hasten.extensions.ray.launch_target import failures_of, run_program, verdict_words
from hasten.launch.base import Host, LaunchPlan, LaunchRequest, Target
from hasten.launch.job import make_plan
from hasten.optional import available, check_installed
from hasten.runtime import env as environment
from hasten.runtime.topology import Topology
from hasten.strategies.choose import device_for

CPU = Host(name="here", cores=4, python="/py")
GPUS = Host(name="here", cores=4, python="/py", device="cuda", num_devices=2)


def planned(
    host: Host = CPU, target: Target | None = None, **settings: Any
) -> LaunchPlan:
    """Plan a launch on Ray with settings of the launch section."""
    code = {
        f"launch.{name.replace('ray_', 'ray.')}": value
        for name, value in {"ray_enabled": True, **settings}.items()
    }
    program = target or Target("train.py", ("--lr", "1"))
    return make_plan(
        LaunchRequest(resolve(code=code).config, program, "{}", folder="/home/me"), host
    )


def test_the_plan_is_one_command_with_the_run_as_json() -> None:
    plan = planned(
        ray_workers="1:4",
        max_restarts=3,
        ray_resources={"CPU": 2},
        ray_storage="s3://runs",
        ray_name="a",
    )
    assert plan.launcher == "ray"
    (proc,) = plan.procs
    assert proc.argv[:3] == ("/py", "-m", "hasten.extensions.ray.launch_target")
    assert proc.argv[4:] == ("train.py", "--lr", "1")
    assert json.loads(proc.argv[3]) == {
        "workers": [1, 4],
        "use_gpu": False,
        "resources": {"CPU": 2},
        "max_failures": 3,
        "address": None,
        "storage": "s3://runs",
        "name": "a",
        "folder": "/home/me",
        "module": False,
    }
    assert proc.env == {"HASTEN_CONFIG": "{}"}
    assert plan.notes == ("1 to 4 workers of Ray Train on the CPU, 3 restart(s)",)


@pytest.mark.parametrize(
    ("host", "settings", "expected"),
    [
        (CPU, {}, ([1, 1], False)),
        (CPU, {"num_processes": 3}, ([3, 3], False)),
        (GPUS, {"num_processes": 2}, ([2, 2], True)),
        (
            CPU,
            {"ray_workers": "2", "ray_resources": {"GPU": 0.5}},
            ([2, 2], True),
        ),  # the driver's machine may have no GPU
    ],
)
def test_workers_and_their_devices(
    host: Host, settings: dict[str, Any], expected: tuple[list[int], bool]
) -> None:
    run = json.loads(planned(host, ray_storage="runs", **settings).procs[0].argv[3])
    assert run["storage"] == "/home/me/runs", "Ray accepts absolute paths and URLs only"
    assert (run["workers"], run["use_gpu"]) == expected


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {"num_machines": 2, "main_process_ip": "a"},
            "main_process_ip, num_machines would have no effect",
        ),
        ({"no_python": True}, "no_python would have no effect"),
        ({"submit": "slurm"}, "ask for ray and slurm"),
        ({"launcher": "mpi"}, "ask for mpi and ray"),
        ({"launcher": "single"}, "contradicts --ray"),
        ({"num_processes": 2, "ray_workers": "1:2"}, "both set the number of workers"),
        ({"ray_workers": "4:2"}, "write one number, or min:max"),
        ({"ray_workers": "many"}, "is not a number of workers"),
        ({"ray_resources": {"GPU": "one"}}, "write numbers, such as CPU=2,GPU=1"),
        ({"ray_enabled": False, "ray_storage": "runs"}, "Add --ray, or remove"),
    ],
)
def test_settings_without_a_meaning_are_refused(
    settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        planned(**settings)


class RayActorError(Exception):
    """The name of Ray's error for an actor that died."""


class GroupError(Exception):
    """An error with one exception for each failed worker, as Ray Train raises it."""

    def __init__(self, **failures: Exception) -> None:
        self.worker_failures = {
            int(rank[1:]): error for rank, error in failures.items()
        }


def test_a_dead_actor_is_a_lost_rank_and_comes_before_its_echoes() -> None:
    echo = RuntimeError("Connection reset by peer")
    dead = RayActorError(
        "hostname='b7',\n pid=41\nThe actor is dead because its node has died. Some common causes are …"
    )
    failures = failures_of(GroupError(r0=echo, r3=dead))
    assert [(failure.rank, failure.lost) for failure in failures] == [
        (0, False),
        (3, True),
    ]
    words = verdict_words(failures)
    assert words.startswith(
        "rank 3 (Ray actor with pid 41 on b7) was lost: its node has died. The other ranks cannot"
    )
    assert "--max_restarts" in words


def test_an_error_of_the_program_comes_before_lost_connections() -> None:
    failures = failures_of(
        GroupError(
            r0=RuntimeError("Connection closed by peer"), r1=ValueError("bad label 7")
        )
    )
    assert verdict_words(failures).startswith("rank 1 failed: ValueError: bad label 7")
    assert failures_of(ValueError("another error")) == []


class _FileSystem:
    def __init__(self, type_name: str) -> None:
        self.type_name = type_name


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("local", "/a/b"),
        ("s3", "s3:///a/b"),
        ("gcs", "gs:///a/b"),
        ("py::fsspec+memory", "memory:///a/b"),
    ],
)
def test_ray_storage_has_a_url(kind: str, expected: str) -> None:
    assert public.fsspec_location(_FileSystem(kind), "/a/b") == expected


def test_storage_that_hasten_cannot_open_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"of type 'mock'.*Choose a storage_path"):
        public.fsspec_location(_FileSystem("mock"), "x")


@pytest.mark.skipif(available("ray"), reason="the error of a machine without ray")
def test_without_ray_the_error_names_the_package() -> None:
    with pytest.raises(
        MissingPackageError,
        match=r"'ray' is not installed; it is needed for hasten.ray.fit. Run: pip install 'hasten\[ray\]'",
    ):
        public.fit(None)
    with pytest.raises(MissingPackageError, match="pip install"):
        check_installed("ray")


def test_the_device_that_ray_assigned_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    # on no machine of these tests
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", "mtia:1")
    with pytest.raises(DeviceError, match="'mtia:1' was asked for"):
        device_for(Config(), Topology())
    assert device_for(Config(cpu=True), Topology()).type == "cpu"


def test_the_device_that_ray_assigned_is_read() -> None:
    assert (
        environment.assigned_device({"ACCELERATE_TORCH_DEVICE": "cuda:1"}) == "cuda:1"
    )
    assert environment.assigned_device({"ACCELERATE_TORCH_DEVICE": ""}) is None
    assert run_program.__module__ == "hasten.extensions.ray.launch_target", (
        "workers import the training loop by this name"
    )
