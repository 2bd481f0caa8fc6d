"""Golden launch plans: what each command line leads to on each kind of machine and cluster, word for word.

Run this file as a program to accept the present plans into launch_plans/.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import pytest

from hasten.cli.launch_cmd import make_parser
from hasten.config import handoff
from hasten.config.resolve import resolve
from hasten.errors import HastenError
from hasten.extensions.xla.tpu_hosts import TpuSlice
from hasten.launch.base import Host, LaunchRequest, Mpi, Target
from hasten.launch.job import make_plan

FOLDER: Final = Path(__file__).with_name("launch_plans")

CPU: Final = Host(name="laptop", cores=8, python="/venv/bin/python")
GPUS: Final = Host(
    name="gpu01",
    cores=96,
    device="cuda",
    num_devices=8,
    device_name="NVIDIA H200",
    python="/venv/bin/python",
)
TPU: Final = Host(
    name="tpu",
    cores=96,
    device="tpu",
    num_devices=4,
    device_name="TPU",
    python="/venv/bin/python",
)


@dataclass(frozen=True, slots=True)
class Case:
    """One command line on one machine."""

    words: str
    host: Host = CPU
    env: Mapping[str, str] = field(default_factory=dict)
    mpi: Mpi = field(default_factory=Mpi)
    tpu: TpuSlice | None = None


def slurm_step(node: int, nodes: int, per_node: int, local: int = 0) -> dict[str, str]:
    """The variables of one task of an srun."""
    return {
        "SLURM_JOB_ID": "4711",
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": str(node * per_node + local),
        "SLURM_LOCALID": str(local),
        "SLURM_NODEID": str(node),
        "SLURM_NTASKS": str(nodes * per_node),
        "SLURM_STEP_NUM_TASKS": str(nodes * per_node),
        "SLURM_STEP_TASKS_PER_NODE": f"{per_node}(x{nodes})",
        "SLURM_STEP_NODELIST": f"gpu[01-{nodes:02}]",
    }


OPENMPI_RANK: Final = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "MASTER_ADDR": "node1",
    "MASTER_PORT": "29511",
}

CASES: Final[dict[str, Case]] = {
    "cpu_one": Case("train.py --lr 3"),
    "cpu_two": Case("--cpu --num-processes 2 train.py"),
    "module": Case("--cpu --num_processes 2 -m pkg.train --lr 3"),
    "program": Case("--cpu --num_processes 2 --no_python ./trainer --lr 3"),
    "gpus_found": Case("--mixed_precision bf16 train.py", GPUS),
    "gpus_chosen": Case("--gpu_ids 2,5 --main_process_port 0 train.py", GPUS),
    "restarts_and_logs": Case("--cpu --num_processes 2 --max_restarts 3 --log_dir logs --tee 3 train.py"),
    "machines_static": Case(
        "--num_machines 2 --machine_rank 1 --main_process_ip 10.0.0.1 --main_process_port 29511 train.py", GPUS
    ),
    "machines_same_command": Case("--num_machines 4 --main_process_ip 10.0.0.1 --num_processes 32 train.py", GPUS),
    "machines_elastic": Case(
        "--nnodes 2:4 --main_process_ip 10.0.0.1 --max_restarts 3 --rdzv_conf last_call_timeout=3 train.py", GPUS
    ),
    "slurm_one_task_per_machine": Case("train.py", GPUS, slurm_step(1, 2, 1)),
    "slurm_one_task_per_device": Case("train.py", GPUS, slurm_step(1, 2, 8, local=3)),
    "slurm_submit": Case(
        "--submit slurm --submit_options partition=gpu,time=08:00:00,gpus_per_node=8 --num_machines 4 "
        "--mixed_precision bf16 train.py --data '/my data'",
        GPUS,
    ),
    "slurm_submit_replicas": Case(
        "--submit slurm --submit_options partition=gpu --num_machines 2 --replicas 4 --min_replicas 2 --num_processes 16 train.py", GPUS
    ),
    "mpi_rank": Case("--cpu train.py", CPU, OPENMPI_RANK),
    "mpirun_openmpi": Case(
        "--cpu --mpirun_hostfile hosts --num_processes 8 train.py --lr 3", CPU, mpi=Mpi("openmpi", ("node1", "node2"))
    ),
    "mpirun_intel": Case(
        "--cpu --mpirun_hostfile hosts --num_processes 8 --mpirun_ccl 2 train.py",
        CPU,
        mpi=Mpi("mpich", ("node1", "node2")),
    ),
    "kubernetes": Case(
        "train.py",
        GPUS,
        {"PET_NNODES": "2", "PET_NODE_RANK": "0", "PET_NPROC_PER_NODE": "8", "PET_MASTER_ADDR": "job-0"},
    ),
    "pod_of_an_elastic_pytorchjob": Case(
        "--processes_per_machine=1 --max_restarts=2 --cpu=true train.py",
        env={
            "PET_NNODES": "2:4",
            "PET_RDZV_BACKEND": "c10d",
            "PET_RDZV_ENDPOINT": "train-worker-0:29500",
            "PET_MAX_RESTARTS": "2",
        },
    ),
    "kubernetes_jobset": Case(
        "--submit kubernetes --num_machines 2 --kubernetes_image registry.example/train:1 --kubernetes_gpus 8 "
        "--kubernetes_resources cpu=64,memory=512Gi --kubernetes_volume runs --kubernetes_namespace team "
        "--kubernetes_labels kueue.x-k8s.io/queue-name=gpus --kubernetes_env NCCL_DEBUG=WARN --kubernetes_env_from wandb "
        "--mixed_precision bf16 train.py --data '/my data'"
    ),
    "kubernetes_trainjob": Case(
        "--submit kubernetes --kind trainjob --apply --num_machines 2 --kubernetes_image registry.example/train:1 --num_processes 4 "
        "--kubernetes_volume runs --kubernetes_max_restarts 5 -m pkg.train"
    ),
    "kubernetes_alone": Case("--submit kubernetes --cpu --kubernetes_image registry.example/train:1 --num_processes 2 train.py"),
    "wrong_kubernetes_elastic": Case("--submit kubernetes --cpu --nnodes 2:4 --kubernetes_image a train.py"),
    "wrong_kubernetes_image": Case("--submit kubernetes --cpu train.py"),
    "deepspeed_standard": Case("--use_deepspeed --zero_stage 3 train.py", GPUS),
    "deepspeed_pdsh": Case(
        "--use_deepspeed --deepspeed_multinode_launcher pdsh --deepspeed_hostfile hosts --num_machines 2 "
        "--num_processes 16 --main_process_ip 10.0.0.1 train.py",
        GPUS,
    ),
    "tpu": Case("--mixed_precision bf16 train.py", TPU),
    "tpu_by_name_of_strategy": Case("--strategy xla train.py", env={"PJRT_DEVICE": "CPU"}),
    "tpu_pod_prepared": Case(
        "--tpu --tpu_cluster --tpu_name pod --tpu_use_sudo --env A=1 --tpu_commands 'pip install x' --vm 0 train.py", TPU
    ),
    "wrong_tpu_absent": Case("--tpu train.py"),
    "wrong_tpu_processes": Case("--num_processes 4 train.py", TPU),
    "wrong_tpu_no_name": Case("--tpu --tpu_cluster train.py", TPU),
    "tpu_pod": Case("--tpu --tpu_cluster --tpu_name pod --tpu_zone us-central2-b train.py --lr 3", TPU),
    "tpu_pod_of_one": Case("--tpu --tpu_cluster --tpu_name one train.py", tpu=TpuSlice(1, "10.0.0.2")),
    "tpu_vm_alone": Case(
        "--tpu --tpu_cluster --tpu_name pod --vm 1 --env TPU_PROCESS_BOUNDS=1,1,1,B=2 train.py", tpu=TpuSlice(4, "10.0.0.2")
    ),
    "tpu_pod_of_four": Case(
        "--tpu --tpu_cluster --tpu_name pod --mixed_precision bf16 --env A=1 train.py --lr 3", tpu=TpuSlice(4, "10.0.0.2")
    ),
    "tpu_host_of_four": Case(
        "--tpu --tpu_name pod --num_machines 4 --main_process_ip 10.0.0.2 train.py", TPU, tpu=TpuSlice(4, worker=2)
    ),
    "tpu_host_by_hand": Case(
        "--tpu --num_machines 2 --machine_rank 1 --main_process_ip 10.0.0.2 train.py", env={"PJRT_DEVICE": "CPU"}
    ),
    "wrong_tpu_pod_rank": Case("--tpu --tpu_cluster --tpu_name pod --machine_rank 1 --num_machines 4 train.py", tpu=TpuSlice(4, "10.0.0.2")),
    "wrong_tpu_pod_count": Case("--tpu --tpu_cluster --tpu_name pod --num_machines 2 train.py", tpu=TpuSlice(4, "10.0.0.2")),
    "wrong_tpu_pod_address": Case("--tpu --tpu_cluster --tpu_name pod train.py", tpu=TpuSlice(4)),
    "wrong_tpu_pod_vm": Case("--tpu --tpu_cluster --tpu_name pod --vm 1 train.py", tpu=TpuSlice(4, "10.0.0.2")),
    "wrong_tpu_number": Case(
        "--tpu --num_machines 2 --main_process_ip 10.0.0.2 train.py", TPU, tpu=TpuSlice(2, worker=3)
    ),
    "wrong_tpu_machines": Case("--num_processes 4 --num_machines 2 --main_process_ip 10.0.0.2 train.py", TPU),
    "wrong_tpu_vms": Case("--tpu --tpu_cluster --tpu_name pod --vm 0,1 train.py"),
    "wrong_tpu_env": Case("--tpu --tpu_cluster --tpu_name pod --env 1 train.py"),
    "wrong_tpu_range": Case("--tpu --tpu_cluster --tpu_name pod --vm 0-3 train.py"),
    "wrong_tpu_slice": Case("--tpu train.py", TPU, tpu=TpuSlice(4)),
    "wrong_port_zero": Case("--num_machines 2 --main_process_ip 10.0.0.1 --main_process_port 0 train.py", GPUS),
    "wrong_no_address": Case("--num_machines 2 train.py", GPUS),
    "wrong_too_many": Case("--num_processes 9 train.py", GPUS),
    "tee_alone": Case("--cpu --tee 3 train.py"),
    "wrong_rdzv_conf": Case("--num_machines 2 --main_process_ip 10.0.0.1 --rdzv_conf keep_alive_interval=2 train.py"),
    "wrong_endpoint": Case("--num_machines 2 --rdzv_endpoint nowhere train.py"),
    "wrong_slurm_outside": Case("--launcher slurm train.py"),
        "ray": Case("--ray --num_processes 4 --ray_resources CPU=4,GPU=1 train.py --lr 1", GPUS),
        "ray_elastic": Case("--ray --ray_workers 1:4 --max_restarts 3 --ray_storage s3://runs --ray_name a -m pack.train"),
    "wrong_single": Case("--launcher single --cpu --num_processes 2 train.py"),
    "wrong_deepspeed_restarts": Case(
        "--use_deepspeed --deepspeed_multinode_launcher pdsh --deepspeed_hostfile hosts --max_restarts 2 train.py", GPUS
    ),
    "wrong_mpi_count": Case("--cpu --launcher mpi train.py"),
}  # fmt: skip


def plan_text(case: Case) -> str:
    """The plan of a case, or the words of its error."""
    argv = split_words(case.words)
    parsed = make_parser().parse_args(argv)
    host = replace(case.host, env=case.env, mpi=case.mpi, tpu=case.tpu)
    try:
        resolved = resolve(flags=parsed.settings)
        launch = resolved.config.launch
        words = parsed.script
        target = Target(
            words[0], tuple(words[1:]), module=launch.module, no_python=launch.no_python
        )
        flags = tuple(argv[: len(argv) - len(words)])
        plan = make_plan(
            LaunchRequest(
                resolved.config,
                target,
                handoff.pack_settings(resolved.entries),
                flags,
                folder="/home/me/run",
            ),
            host,
        )
    except HastenError as error:
        return f"$ hasten launch {case.words}\n{type(error).__name__}: {error}\n"
    return f"$ hasten launch {case.words}\n{plan.render_text()}\n"


def split_words(text: str) -> list[str]:
    """The words of a command line as a shell would pass them."""
    return shlex.split(text)


@pytest.mark.parametrize("name", CASES)
def test_plan_is_the_accepted_one(name: str) -> None:
    assert plan_text(CASES[name]) == (FOLDER / f"{name}.txt").read_text()


def test_no_accepted_plan_is_left_over() -> None:
    assert {file.stem for file in FOLDER.glob("*.txt")} == set(CASES)


if __name__ == "__main__":
    for file in FOLDER.glob("*.txt"):
        file.unlink()
    for name, case in CASES.items():
        (FOLDER / f"{name}.txt").write_text(plan_text(case))
    sys.stdout.write(f"{len(CASES)} plans accepted\n")
