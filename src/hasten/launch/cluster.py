"""Machines and ranks from the environment variables of SLURM, MPI, LSF and Kubernetes. Does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hasten.errors import ConfigError, TopologyError
from hasten.runtime.topology import DEFAULT_PORT, Topology


@dataclass(frozen=True, slots=True)
class Allocation:
    """This command's position among the identical commands that the cluster started."""

    source: str = ""
    num_machines: int = 1
    min_machines: int = 1
    machine_rank: int | None = None
    address: str | None = None
    port: int | None = None
    per_machine: int | None = None
    """Number of processes that the cluster wants on each machine, if specified."""
    rank: Topology | None = None
    """Set if the cluster started one command per rank: no further processes are started, this command is the rank."""


def read_allocation(env: Mapping[str, str]) -> Allocation:
    """Return the allocation described by `env`; one machine if nothing describes more.

    Raises: TopologyError if the variables contradict each other.
    """
    return _elastic_pods(env) or _pods(env) or _tasks(env) or _lsf_hosts(env) or Allocation()


def _elastic_pods(env: Mapping[str, str]) -> Allocation | None:
    """Return the allocation in torchrun's variables (PET_*), as the Kubernetes training operator sets them."""
    if "PET_NNODES" not in env:
        return None
    low, high = split_range(env["PET_NNODES"], "PET_NNODES")
    rank = env.get("PET_NODE_RANK", "")
    per = env.get("PET_NPROC_PER_NODE", "")
    endpoint = env.get("PET_RDZV_ENDPOINT", "")
    address = env.get("PET_MASTER_ADDR") or env.get("MASTER_ADDR") or endpoint.rpartition(":")[0] or None
    port = env.get("PET_MASTER_PORT") or env.get("MASTER_PORT") or endpoint.rpartition(":")[2]
    if high == 1 and not per.isdecimal():
        return None
    return Allocation(
        source="Kubernetes (PET_*)",
        num_machines=high,
        min_machines=low,
        machine_rank=int(rank) if rank.isdecimal() else None,
        address=address,
        port=int(port) if port.isdecimal() else DEFAULT_PORT,
        per_machine=int(per) if per.isdecimal() else None,
    )


def _pods(env: Mapping[str, str]) -> Allocation | None:
    """Return the allocation of one command per pod: RANK of WORLD_SIZE (or NODE_RANK of NNODES), without LOCAL_RANK."""
    if "LOCAL_RANK" in env or not env.get("MASTER_ADDR"):
        return None
    for rank_name, size_name in (("NODE_RANK", "NNODES"), ("RANK", "WORLD_SIZE"), ("JOB_COMPLETION_INDEX", "NNODES")):
        rank, size = env.get(rank_name, ""), env.get(size_name, "")
        if rank.isdecimal() and size.isdecimal() and int(size) > 1:
            if int(rank) >= int(size):
                raise TopologyError(
                    f"{rank_name}={rank} with {size_name}={size} is impossible: machines count from 0 to {size_name}-1. "
                    f"Make the variables agree, or unset those of another launcher."
                )
            port = env.get("MASTER_PORT", "")
            return Allocation(
                source=f"{rank_name} and {size_name}",
                num_machines=int(size),
                min_machines=int(size),
                machine_rank=int(rank),
                address=env["MASTER_ADDR"],
                port=int(port) if port.isdecimal() else DEFAULT_PORT,
            )
    return None


def _tasks(env: Mapping[str, str]) -> Allocation | None:
    """Return the allocation of a command started by srun, mpirun or jsrun: one per machine, or one per rank."""
    if "LOCAL_RANK" in env:
        return None
    topology = Topology.from_env(env)
    if topology.source not in ("slurm", "mpi", "lsf") or topology.world_size == 1:
        return None
    if topology.local_world_size > 1:
        return Allocation(source=topology.source, rank=topology)
    address, port = _split_address(topology.rendezvous)
    return Allocation(
        source=topology.source,
        num_machines=topology.world_size,
        min_machines=topology.world_size,
        machine_rank=topology.rank,
        address=address,
        port=port,
    )


def _lsf_hosts(env: Mapping[str, str]) -> Allocation | None:
    """Return the allocation of one command per host under LSF's blaunch; the position in the host list is the rank."""
    hosts = list(dict.fromkeys(env.get("LSB_MCPU_HOSTS", "").split()[::2]))
    name = env.get("HOSTNAME", "")
    if len(hosts) < 2 or "LSB_JOBID" not in env:
        return None
    rank = next((i for i, host in enumerate(hosts) if host.split(".")[0] == name.split(".")[0]), None)
    job = env.get("LSB_JOBID", "0")
    return Allocation(
        source="LSF",
        num_machines=len(hosts),
        min_machines=len(hosts),
        machine_rank=rank,
        address=hosts[0],
        port=12000 + int(job if job.isdecimal() else 0) * 31 % 20000,
    )


def split_range(text: str, name: str = "--nnodes") -> tuple[int, int]:
    """Return the smallest and largest number of machines in `4` or `2:4`.

    Raises: ConfigError for anything else.
    """
    low, _, high = text.strip().partition(":")
    high = high or low
    if low.isdecimal() and high.isdecimal() and 1 <= int(low) <= int(high):
        return int(low), int(high)
    raise ConfigError(f"{name}={text!r} is not a number of machines; write one number, or min:max such as 2:4.")


def _split_address(rendezvous: str | None) -> tuple[str | None, int | None]:
    """Return the host and the port in tcp://host:port."""
    if not rendezvous:
        return None, None
    host, _, port = rendezvous.removeprefix("tcp://").rpartition(":")
    return host.strip("[]"), int(port)
