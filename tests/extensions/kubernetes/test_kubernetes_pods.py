"""The life of a job's pods with real processes: network namespaces as pods, started as their manifest says, evicted, and restarted."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from hasten import Accelerator
from hasten.cli.launch_cmd import make_parser
from hasten.config import handoff
from hasten.config.resolve import resolve
from hasten.extensions.kubernetes.manifests import plan_submit
from hasten.launch.base import Host, LaunchRequest, Target
from hasten.runtime.context import ProcessContext
from hasten.testing.pool import Pool
from tests.support.machines import (
    NamespaceMachine,
    Zygote,
    machines,
    warm_launcher,
    why_impossible,
)
from tests.support.preemptible import train

pytestmark = [pytest.mark.slow, pytest.mark.timed, pytest.mark.timeout(300)]

ZYGOTE: Final = Path(__file__).parents[2] / "support" / "launch_zygote.py"

TRAIN: Final = Path(__file__).parents[2] / "support" / "preemptible.py"
SAMPLES: Final = 240


def undisturbed(ctx: ProcessContext, folder: str) -> None:
    """The same training in the pool's processes, without any signal."""
    train(Accelerator(context=ctx, project_dir=folder), SAMPLES)


@pytest.fixture(scope="module")
def zygote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygote]:
    """A warm launcher; skips with the reason where namespaces cannot be made."""
    if reason := why_impossible():
        pytest.skip(reason)
    with warm_launcher(ZYGOTE, tmp_path_factory.mktemp("home")) as process:
        yield process


def manifest(kind: str) -> list[dict[str, Any]]:
    """The objects that `hasten launch --submit kubernetes` writes for the training."""
    flags = [
        "--submit=kubernetes",
        f"--kind={kind}",
        "--kubernetes_image=a",
        "--kubernetes_name=train",
        "--cpu",
        "--num_machines=2",
        "--quiet",
    ]
    resolved = resolve(flags=make_parser().parse_args(flags).settings)
    words = (str(SAMPLES), "0.04", "0")
    request = LaunchRequest(
        resolved.config,
        Target(str(TRAIN), words),
        handoff.pack_settings(resolved.entries),
    )
    return list(yaml.safe_load_all(plan_submit(request, Host()).files[0].text))


def container_of(manifest: object) -> dict[str, Any]:
    """The container with the command: that of the pod template, or a TrainJob's trainer."""
    if isinstance(manifest, dict) and "command" in manifest:
        return manifest
    inner = (
        manifest.values()
        if isinstance(manifest, dict)
        else manifest
        if isinstance(manifest, list)
        else ()
    )
    return next((container for item in inner if (container := container_of(item))), {})


def pod(kind: str, index: int) -> tuple[list[str], dict[str, str], str]:
    """The command and the variables of one pod, as kubelet and operators make them, and the host name of the first pod."""
    container = container_of(manifest(kind)[-1])
    attempt = {
        "jobset-name": "train",
        "replicatedjob-name": "node",
        "restart-attempt": "0",
        "job-completion-index": str(index),
    }
    env: dict[str, str] = {}
    for item in container.get("env", []):
        source = item.get("valueFrom", {})
        if "fieldRef" in source:  # a label or an annotation of the pod
            env[item["name"]] = attempt[
                source["fieldRef"]["fieldPath"].rpartition("/")[2].removesuffix("']")
            ]
        else:
            env[item["name"]] = item["value"]
    first = "train-node-0-0.train"
    if kind == "jobset":
        env["JOB_COMPLETION_INDEX"] = str(index)
    else:
        env |= {
            "JOB_COMPLETION_INDEX": str(index),
            "PET_NNODES": "2",
            "PET_NODE_RANK": str(index),
            "PET_NPROC_PER_NODE": "1",
            "PET_MASTER_ADDR": first,
            "PET_MASTER_PORT": "29500",
        }
    command: list[str] = container["command"]
    assert command[:4] == ["python", "-m", "hasten", "launch"]
    return command[4:], env, first


def start(
    folder: Path,
    kind: str,
    order: list[NamespaceMachine],
    attempt: int,
    **variables: str,
) -> None:
    """Start one pod on each machine; the position in `order` is the index."""
    for index, machine in enumerate(order):
        words, env, first = pod(kind, index)
        hosts = folder / f"hosts-{attempt}"
        hosts.write_text(
            f"127.0.0.1 localhost\n{order[0].host.address} {first}\n"
        )  # what the headless Service resolves to
        machine.hosts_file = str(hosts)
        machine.start(folder, words, **env, **variables)


def wait_for_lines(file: Path, more_than: int) -> None:
    """Wait until a file has more than so many lines."""
    deadline = time.monotonic() + 240
    while (file.read_text().count("\n") if file.exists() else 0) <= more_than:
        assert time.monotonic() < deadline, f"{file} has not enough lines"
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("kind", "preempted"),
    [
        ("jobset", 85),
        pytest.param("trainjob", 85, marks=pytest.mark.exhaustive),
    ],
)
def test_an_evicted_pod_saves_and_the_job_ends_elsewhere_as_if_undisturbed(
    zygote: Zygote, tmp_path: Path, rank_pool: Pool, kind: str, preempted: int
) -> None:
    run, undisturbed_folder = tmp_path / "run", tmp_path / "whole"
    run.mkdir()
    undisturbed_folder.mkdir()
    rank_pool.run(undisturbed, 2, str(undisturbed_folder))
    with machines(zygote, 2) as (a, b):
        start(tmp_path, kind, [a, b], 0)
        wait_for_lines(run / "seen-1", 5)
        # kubelet evicts one pod; its process 1 is the launcher
        os.kill(b.launcher, signal.SIGTERM)
        evicted_exits = [a.end(), b.end()]
        assert [code for code, _ in evicted_exits] == [preempted, preempted], (
            evicted_exits
        )
        assert "end" not in (run / "seen-0").read_text()
        start(
            tmp_path,
            kind,
            [b, a],
            1,
            # the replacements run on each other's node, so the first pod has another address
        )
        final_exits = [a.end(), b.end()]
    assert [code for code, _ in final_exits] == [0, 0], final_exits
    for rank in range(2):
        assert (run / f"seen-{rank}").read_text() == (
            undisturbed_folder / f"seen-{rank}"
        ).read_text()
    assert len(list((run / "checkpoints").iterdir())) == 1


DIRECT_SCRIPT: Final = """
import torch
from hasten import Accelerator
accelerator = Accelerator()
total = accelerator.reduce(torch.tensor(accelerator.process_index + 1.0), "sum")
print(accelerator.process_index, accelerator.num_processes, accelerator.device.type, total.item())
"""


@pytest.mark.parametrize(
    "kind",
    [
        "by hand",
        *(
            pytest.param(kind, marks=pytest.mark.exhaustive)
            for kind in ("jobset", "trainjob")
        ),
    ],
)
def test_a_script_that_runs_directly_in_its_pod_needs_no_settings(
    tmp_path: Path, kind: str
) -> None:
    running = []
    with socket.create_server(("127.0.0.1", 0)) as probe:
        free = str(probe.getsockname()[1])
    for index in range(2):
        _, env, first = pod("jobset" if kind == "by hand" else kind, index)
        pod_variables = {
            name: "127.0.0.1" if value == first else value
            for name, value in env.items()
        }
        if kind == "by hand":
            pod_variables = {
                "JOB_COMPLETION_INDEX": str(index),
                "NNODES": "2",
                "MASTER_ADDR": "127.0.0.1",
            }
        port = dict.fromkeys(("MASTER_PORT", "PET_MASTER_PORT"), free)
        variables = {
            "KUBERNETES_SERVICE_HOST": "10.0.0.1",
            "HASTEN_HOME": str(tmp_path),
            "CUDA_VISIBLE_DEVICES": "",
        }
        environment = {**os.environ, **variables, **pod_variables, **port}
        words = [sys.executable, "-c", DIRECT_SCRIPT]
        running.append(
            subprocess.Popen(
                words,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    outputs = [process.communicate(timeout=240) for process in running]
    assert [out for out, _ in outputs] == ["0 2 cpu 3.0\n", "1 2 cpu 3.0\n"], outputs
