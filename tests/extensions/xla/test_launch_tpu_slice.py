"""The machines of a TPU are counted before anything runs on them: by a stand-in for gcloud, and by this machine's variables."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from hasten.cli.launch_cmd import make_parser
from hasten.errors import ConfigError
from hasten.extensions.xla import tpu_hosts
from hasten.extensions.xla.settings import XLAConfig
from hasten.launch.base import Host
from hasten.launch.job import Job, prepare

CLUSTER = "--tpu --tpu_cluster --tpu_name big --tpu_zone z-1"


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A script to launch, in an empty folder from which programs are started too."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    (tmp_path / "train.py").touch()
    return str(tmp_path / "train.py")


def gcloud(folder: Path, answer: str, code: int = 0) -> Path:
    """A program named gcloud that notes how it was called; the file with its notes."""
    program, notes = folder / "gcloud", folder / "asked"
    program.write_text(
        f'#!/bin/sh\necho "$@" >> {shlex.quote(str(notes))}\necho {shlex.quote(answer)}\nexit {code}\n'
    )
    program.chmod(0o755)
    return notes


def endpoints(count: int) -> str:
    return json.dumps(
        {
            "networkEndpoints": [
                {"ipAddress": f"10.0.0.{n}", "port": 8470} for n in range(count)
            ]
        }
    )


def job(words: str, script: str, host: Host | None = None) -> Job:
    """The job of a command line, on a machine with gcloud and no TPU unless said otherwise."""
    typed = shlex.split(words)
    args = make_parser().parse_args([*typed, script])
    host = host or Host(programs=frozenset({"gcloud"}))
    return prepare(args.script, settings=args.settings, typed=typed, host=host)


def test_gcloud_is_asked_before_anything_runs_there(
    script: str, tmp_path: Path
) -> None:
    log_file = gcloud(tmp_path, endpoints(4))
    command = job(CLUSTER, script).plan.procs[0].argv[-1]
    assert command.endswith(f"--num_machines 4 --main_process_ip 10.0.0.0 {script}")
    assert log_file.read_text().splitlines() == [
        "compute tpus tpu-vm describe big --format json(networkEndpoints) --quiet --zone z-1"
    ]


def test_one_vm_of_several_would_wait_for_the_others(
    script: str, tmp_path: Path
) -> None:
    gcloud(tmp_path, endpoints(4))
    with pytest.raises(
        ConfigError,
        match=r"--vm 2 names one of 4 hosts .* add --env TPU_PROCESS_BOUNDS=1,1,1",
    ):
        job(f"{CLUSTER} --vm 2", script)
    plan = job(f"{CLUSTER} --vm 2 --env TPU_PROCESS_BOUNDS=1,1,1", script).plan
    assert "--worker 2" in " ".join(plan.procs[0].argv)


@pytest.mark.parametrize(
    ("answer", "code", "words"),
    [
        (endpoints(1), 0, "big has 1 host"),
        ("{}", 0, "did not report"),
        ("ERROR: denied", 1, "did not report"),
    ],
)
def test_one_host_and_an_unknown_number_go_on(
    script: str, tmp_path: Path, answer: str, code: int, words: str
) -> None:
    gcloud(tmp_path, answer, code)
    assert words in " ".join(job(CLUSTER, script).plan.notes)


def test_this_machine_of_a_slice_is_refused_before_training(script: str) -> None:
    env = {"TPU_WORKER_HOSTNAMES": "a,b"}
    with pytest.raises(ConfigError, match="this TPU slice has 2 hosts"):
        job("", script, Host(device="tpu", num_devices=4, env=env))
    single_host = Host(
        device="tpu", num_devices=4, env={**env, "TPU_PROCESS_BOUNDS": "1,1,1"}
    )
    assert job("", script, single_host).plan.launcher == "single"
    on_cpu = Host(device="tpu", num_devices=4, env={**env, "PJRT_DEVICE": "CPU"})
    assert job("", script, on_cpu).plan.launcher == "single"


def test_the_hosts_of_a_slice_take_their_own_numbers(script: str) -> None:
    words = "--num_machines 3 --main_process_ip 10.0.0.1"
    env = {"TPU_WORKER_ID": "2", "TPU_WORKER_HOSTNAMES": "a,b,c", "PJRT_DEVICE": "TPU"}
    plan = job(words, script, Host(device="tpu", num_devices=8, env=env)).plan
    assert plan.meeting is not None
    assert (
        plan.meeting.machine_rank,
        plan.meeting.max_machines,
        plan.procs[0].count,
    ) == (2, 3, 1)
    assert plan.procs[0].env["TPU_CHIPS_PER_PROCESS_BOUNDS"] == "2,4,1"
    assert tpu_hosts.count_hosts(plan.procs[0].env) == 1  # so that XLA waits for nobody
    ranked_plan = job(
        f"{words} --machine_rank 1", script, Host(device="tpu", num_devices=8, env=env)
    ).plan
    assert ranked_plan.meeting is not None
    assert ranked_plan.meeting.machine_rank == 1


def test_a_job_without_tpus_is_not_counted(
    script: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        tpu_hosts, "count_hosts", lambda env: pytest.fail("somebody was asked")
    )
    tpu = Host(device="tpu", num_devices=4, env={"TPU_WORKER_HOSTNAMES": "a,b"})
    assert job("--cpu --num_processes 1", script, tpu).plan.launcher == "single"
    assert job("", script, Host()).plan.launcher == "single"


@pytest.mark.parametrize("source", ["flag", "file", "file with a list"])
def test_commands_for_the_vms_may_hold_commas(
    script: str, tmp_path: Path, source: str
) -> None:
    gcloud(tmp_path, endpoints(1))
    lines = ["(cd /tmp && pip install 'a[x,y]' b)", "echo 1,2"]
    if source == "flag":
        prepared_job = job(
            f"{CLUSTER} --tpu_commands {shlex.quote(chr(10).join(lines))}", script
        )
    else:
        file = tmp_path / "settings.json"
        commands = lines if source == "file with a list" else "\n".join(lines)
        file.write_text(json.dumps({"xla": {"commands": commands}}))
        args = make_parser().parse_args([*shlex.split(CLUSTER), script])
        host = Host(programs=frozenset({"gcloud"}))
        prepared_job = prepare(
            args.script, settings=args.settings, config_file=str(file), host=host
        )
    assert prepared_job.request.config.section(XLAConfig).commands == tuple(lines)
    assert (
        prepared_job.plan.procs[0]
        .argv[-1]
        .startswith(f"{lines[0]}; {lines[1]}; hasten launch")
    )


def test_no_commands_for_the_vms(script: str, tmp_path: Path) -> None:
    gcloud(tmp_path, endpoints(1))
    assert (
        job(f"{CLUSTER} --tpu_commands none", script)
        .request.config.section(XLAConfig)
        .commands
        is None
    )
