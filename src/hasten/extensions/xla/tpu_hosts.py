"""Hosts of a TPU slice: number, index of this host, variables for using one host alone. Does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from http.client import HTTPException
from types import MappingProxyType
from typing import Final
from urllib.request import ProxyHandler, Request, build_opener

from hasten.runtime.topology import is_single_tpu_process, tpu_workers

_METADATA: Final = "metadata.google.internal"
_WAIT_S: Final = 3.0
_CHIPS: Final = MappingProxyType({1: "1,1,1", 2: "1,2,1", 4: "2,2,1", 8: "2,4,1"})
"""Layout of one machine's chips, by their number."""


@dataclass(frozen=True, slots=True)
class TpuSlice:
    """Facts about a TPU that are known before a job is planned."""

    hosts: int
    first: str | None = None
    """The address of host 0, for jobs that are started from another machine."""
    worker: int | None = None
    """The index of this host in the slice."""


def count_hosts(variables: Mapping[str, str]) -> int | None:
    """Return the number of hosts in this host's slice: from variables, else from Google's metadata; None if unknown."""
    if is_single_tpu_process(variables):
        return 1
    return len(tpu_workers(variables)) or (
        None if variables.get("TPU_SKIP_MDS_QUERY") else _by_metadata(variables)
    )


def worker_index(variables: Mapping[str, str]) -> int | None:
    """Return this host's index in its slice: from TPU_WORKER_ID, else from Google's metadata; None if unknown."""
    text = variables.get("TPU_WORKER_ID")
    if not text and not variables.get("TPU_SKIP_MDS_QUERY"):
        text = _ask_metadata(variables, "agent-worker-number")
    return int(text) if text is not None and text.strip().isdecimal() else None


def variables_of_single_host(env: Mapping[str, str], chips: int) -> dict[str, str]:
    """Return the variables that make a host with `chips` chips run alone; values in `env` take precedence."""
    variables = {"TPU_PROCESS_BOUNDS": "1,1,1", "CLOUD_TPU_TASK_ID": "0"}
    if chips in _CHIPS:
        variables["TPU_CHIPS_PER_PROCESS_BOUNDS"] = (
            env.get("TPU_CHIPS_PER_PROCESS_BOUNDS") or _CHIPS[chips]
        )
        variables["TPU_VISIBLE_CHIPS"] = env.get("TPU_VISIBLE_CHIPS") or ",".join(
            map(str, range(chips))
        )
    return variables


def _by_metadata(variables: Mapping[str, str]) -> int | None:
    text = _ask_metadata(variables, "worker-network-endpoints") or ""
    return len([worker for worker in text.split(",") if worker.strip()]) or None


def _ask_metadata(variables: Mapping[str, str], name: str) -> str | None:
    """Return an attribute from the metadata server of a TPU VM, at GCE_METADATA_HOST or its default address."""
    url = f"http://{variables.get('GCE_METADATA_HOST') or _METADATA}/computeMetadata/v1/instance/attributes/{name}"
    try:
        # The metadata server is link-local: a proxy would not reach it.
        with build_opener(ProxyHandler({})).open(
            Request(url, headers={"Metadata-Flavor": "Google"}), timeout=_WAIT_S
        ) as answer:
            text: str = answer.read().decode()
            return text
    except (OSError, HTTPException, ValueError):
        return None


def unjoined_hosts_message(hosts: int) -> str:
    """Return the error message for a host of a slice that is configured neither to join the others nor to run alone."""
    return (
        f"this TPU slice has {hosts} hosts, and this process was not told how to meet the others: XLA would wait for them and hasten would "
        "count one host. Start the same command on every host with `hasten launch --tpu --num_machines "
        f"{hosts} --main_process_ip ADDRESS_OF_HOST_0 script.py`, from elsewhere with `hasten launch --tpu --tpu_cluster --tpu_name NAME script.py`; "
        "or set TPU_PROCESS_BOUNDS=1,1,1 to use this host by itself."
    )


def joined_hosts_message(hosts: int) -> str:
    """Return the error message for hosts that XLA has joined into one world, which is not supported."""
    return (
        f"XLA has joined {hosts} hosts into one world, in which strategy='xla' was never run; what it computed there could not be trusted. "
        "Start the script with `hasten launch --tpu`, which makes each host a separate world (TPU_PROCESS_BOUNDS=1,1,1)."
    )
