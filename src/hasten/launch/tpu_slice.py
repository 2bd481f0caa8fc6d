"""The machines of a job's TPU: asked of gcloud for a TPU named in the settings, else of this machine."""

from __future__ import annotations

import json
import subprocess
from typing import Final

from hasten.launch.base import Request
from hasten.launch.host import Host
from hasten.runtime import tpu_hosts
from hasten.runtime.tpu_hosts import Slice

_LIMIT_S: Final = 60.0


def ask(request: Request, host: Host) -> Slice | None:
    """The machines; None for a job without TPUs, and where nobody knows."""
    launch, xla = request.config.launch, request.config.xla
    if launch.tpu and xla.tpu_use_cluster:
        return _ask_gcloud(xla.tpu_name, xla.tpu_zone) if xla.tpu_name and "gcloud" in host.programs else None
    device = host.env.get("PJRT_DEVICE") or ("TPU" if host.device == "tpu" else None)
    if device != "TPU" or request.config.cpu:
        return None
    if (
        launch.num_machines > 1
    ):  # this machine's number is not needed where it was given, and its slice is not used as such
        return Slice(launch.num_machines, worker=tpu_hosts.worker(host.env) if launch.machine_rank is None else None)
    hosts = tpu_hosts.count(host.env)
    return None if hosts is None else Slice(hosts)


def _ask_gcloud(name: str, zone: str | None) -> Slice | None:
    """The network endpoints of a TPU, one for each of its machines; None where gcloud fails, as running it will tell why."""
    command = ["gcloud", "compute", "tpus", "tpu-vm", "describe", name, "--format", "json(networkEndpoints)", "--quiet"]
    command += ["--zone", zone] if zone else []
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, check=True)
        endpoints = json.loads(done.stdout)["networkEndpoints"]
        return Slice(len(endpoints), endpoints[0].get("ipAddress")) if endpoints else None
    except (OSError, subprocess.SubprocessError, ValueError, KeyError, TypeError, AttributeError):
        return None
