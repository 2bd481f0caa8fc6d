"""`hasten test` and `hasten env` for real, and ranks that a cluster's own starter has made."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Final

import pytest
from torch.distributed import TCPStore

from hasten import Accelerator
from hasten.cli.main import main
from hasten.extensions.selfcheck.selfcheck import CheckFailed, measured_links
from hasten.extensions.selfcheck.selfcheck import run_checks as self_check
from hasten.launch.network import free_port
from hasten.runtime.context import ProcessContext
from hasten.testing.pool import ranks

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def native_leftovers() -> None:
    """The first store of a process makes a pipe that its native library keeps forever: let it be made before we look."""
    TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@ranks(1, 2, 3)
def test_the_self_check_passes_on_real_ranks(ctx: ProcessContext) -> None:
    assert self_check(Accelerator(cpu=True, context=ctx))


@ranks(4)
def test_links_are_measured_inside_machines_and_between_them(
    ctx: ProcessContext,
) -> None:
    topology = replace(
        ctx.topology,
        node_rank=ctx.rank // 2,
        local_rank=ctx.rank % 2,
        local_world_size=2,
    )
    links = measured_links(
        Accelerator(cpu=True, context=replace(ctx, topology=topology))
    )
    assert (links.device, links.machines, links.per_machine) == ("cpu", 2, 2)
    assert links.node_gb_s is not None
    assert links.node_gb_s > 0
    assert links.network_gb_s is not None
    assert links.network_gb_s > 0


@ranks(2)
def test_a_machine_alone_has_no_network(ctx: ProcessContext) -> None:
    links = measured_links(Accelerator(cpu=True, context=ctx))
    assert links.node_gb_s is not None
    assert links.network_gb_s is None


def test_one_process_has_no_links() -> None:
    with pytest.raises(CheckFailed, match="start two or more"):
        measured_links(Accelerator(cpu=True))


def test_the_self_check_tells_which_rank_fails(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def broken(accelerator: Accelerator) -> str:
        raise RuntimeError("no route")

    assert not self_check(Accelerator(cpu=True), (("network", broken),))
    assert (
        capsys.readouterr().out
        == "FAILED  network      rank 0: RuntimeError: no route\n"
    )


@pytest.mark.exhaustive
def test_hasten_test_checks_under_the_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HASTEN_HOME", str(tmp_path))
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    assert (
        main(["test", "--cpu", "--num_processes", "2", "--mixed_precision", "bf16"])
        == 0
    )
    out = capfd.readouterr().out
    assert re.search(
        r"^passed  training +ranks 0-1: 8 updates, bf16: losses differ from one process by ",
        out,
        re.MULTILINE,
    )
    assert re.search(
        r"^passed  all-reduce +ranks 0-1: \d+\.\d+ GB/s over 2 processes",
        out,
        re.MULTILINE,
    )
    assert out.endswith("everything works\n")


def test_hasten_env_can_be_pasted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HASTEN_HOME", str(tmp_path))
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    monkeypatch.setenv("TORCH_HUB_TOKEN", "hidden-value")
    assert main(["env"]) == 0
    text = capsys.readouterr().out
    assert "NCCL_DEBUG: WARN" in text
    assert "hidden-value" not in text
    assert main(["env", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["torch"]["backends"].startswith("gloo")
    assert report["packages"]["torch"] == report["torch"]["version"]


TASK: Final = """
import os
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor([float(os.environ["RANK"])])
dist.all_reduce(total)
print("rank", os.environ["RANK"], "sum", int(total), "local", os.environ["LOCAL_RANK"])
dist.destroy_process_group()
"""


def start_tasks(
    folder: Path, changes: tuple[dict[str, str], ...]
) -> list[tuple[int, str]]:
    """Exit code and output of `hasten launch` under srun with two tasks on one node, each with changed variables."""
    (folder / "task.py").write_text(TASK)
    port = str(free_port())
    tasks = []
    for rank, change in enumerate(changes):
        env = {
            "SLURM_JOB_ID": "5",
            "SLURM_STEP_ID": "0",
            "SLURM_PROCID": str(rank),
            "SLURM_LOCALID": str(rank),
            "SLURM_NODEID": "0",
            "SLURM_NTASKS": "2",
            "SLURM_STEP_TASKS_PER_NODE": "2",
            "SLURM_STEP_NODELIST": "localhost",
            "MASTER_PORT": port,
            "HASTEN_HOME": str(folder),
            "HF_HOME": str(folder),
            **change,
        }
        command = [
            sys.executable,
            "-m",
            "hasten.cli.main",
            "launch",
            "--cpu",
            "task.py",
        ]
        tasks.append(
            subprocess.Popen(
                command,
                cwd=folder,
                env={**os.environ, **env},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    try:
        exits = [(task.communicate(timeout=60)[0], task.returncode) for task in tasks]
        return [(code, text) for text, code in exits]
    finally:
        for task in tasks:
            task.kill()
            task.communicate()


def test_ranks_made_by_srun_meet(tmp_path: Path) -> None:
    (code_0, text_0), (code_1, text_1) = start_tasks(tmp_path, ({}, {}))
    assert (code_0, code_1) == (0, 0), text_0 + text_1
    assert "rank 0 sum 1 local 0" in text_0
    assert "rank 1 sum 1 local 1" in text_1


UNDER_MPIRUN: Final = """
import torch
from hasten import Accelerator
accelerator = Accelerator(cpu=True)
total = accelerator.reduce(torch.tensor([accelerator.process_index + 1]), "sum").item()
place = accelerator.process_index, accelerator.local_process_index, accelerator.num_processes
open(f"rank-{place[0]}", "w").write(f"{place} {total} {torch.distributed.get_backend()}")
"""


def test_a_script_under_mpirun_finds_its_ranks(tmp_path: Path) -> None:
    """Plain `mpirun python script.py`: ranks, and a port of the job's own, come from Open MPI's variables."""
    if shutil.which("mpirun") is None:
        pytest.skip("mpirun is not installed")
    (tmp_path / "script.py").write_text(UNDER_MPIRUN)
    env = {**os.environ, "HASTEN_HOME": str(tmp_path), "HF_HOME": str(tmp_path)}
    version = subprocess.run(
        ["mpirun", "--version"], capture_output=True, text=True
    ).stdout
    extra = ["--allow-run-as-root", "--oversubscribe"] if "Open MPI" in version else []
    command = ["mpirun", *extra, "-n", "2", sys.executable, "script.py"]
    done = subprocess.run(
        command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    assert [(tmp_path / f"rank-{i}").read_text() for i in range(2)] == [
        "(0, 0, 2) 3 gloo",
        "(1, 1, 2) 3 gloo",
    ]
