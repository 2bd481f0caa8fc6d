"""How many machines a TPU slice has, told before XLA waits for all of them; no torch."""

from __future__ import annotations

from collections.abc import Mapping
from http.client import HTTPException
from typing import Final
from urllib.request import ProxyHandler, Request, build_opener

_BOUNDS: Final = ("TPU_PROCESS_BOUNDS", "TPU_HOST_BOUNDS")
_METADATA: Final = "metadata.google.internal"
_WAIT_S: Final = 3.0


def workers(env: Mapping[str, str]) -> list[str]:
    """The hosts of the slice as TPU_WORKER_HOSTNAMES lists them; none where a machine was told to be alone."""
    return [] if alone(env) else [host for host in env.get("TPU_WORKER_HOSTNAMES", "").split(",") if host]


def alone(env: Mapping[str, str]) -> bool:
    """Whether variables tell libtpu to use this machine of a slice by itself."""
    bounds = next((env[name] for name in _BOUNDS if env.get(name)), "")
    return bool(bounds) and all(size.strip() == "1" for size in bounds.split(","))


def count(env: Mapping[str, str]) -> int | None:
    """The machines of this machine's slice: from variables, else from Google's metadata; None if neither knows."""
    if alone(env):
        return 1
    return len(workers(env)) or (None if env.get("TPU_SKIP_MDS_QUERY") else _by_metadata(env))


def _by_metadata(env: Mapping[str, str]) -> int | None:
    """What the metadata server of a TPU VM knows; GCE_METADATA_HOST is where Google's own programs look for it."""
    url = f"http://{env.get('GCE_METADATA_HOST') or _METADATA}/computeMetadata/v1/instance/attributes/worker-network-endpoints"
    try:
        # The server is on this machine's own link: a proxy would not reach it.
        with build_opener(ProxyHandler({})).open(
            Request(url, headers={"Metadata-Flavor": "Google"}), timeout=_WAIT_S
        ) as answer:
            text = answer.read().decode()
    except (OSError, HTTPException, ValueError):
        return None
    return len([worker for worker in text.split(",") if worker.strip()]) or None


def refusal(hosts: int, which: str = "this TPU slice") -> str:
    """Why a slice of several hosts is not trained on, and what to do."""
    return (
        f"{which} has {hosts} hosts, and strategy='xla' was never run on more than one; what it computed there could not be "
        "trusted. Use a slice with a single host (such as v5litepod-8), or strategy='fsdp' on GPUs. docs/engines.md tells how to use "
        "one host of a slice by itself."
    )
