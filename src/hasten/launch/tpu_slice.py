"""How many machines the TPU of a job has: asked of gcloud for a TPU named in the settings, else of this machine."""

from __future__ import annotations

import json
import subprocess
from typing import Final

from hasten.launch.base import Request
from hasten.launch.host import Host
from hasten.runtime import tpu_hosts

_LIMIT_S: Final = 60.0


def ask(request: Request, host: Host) -> int | None:
    """The number of machines; None for a job without TPUs, and where nobody knows."""
    launch, xla = request.config.launch, request.config.xla
    if launch.tpu and xla.tpu_use_cluster:
        return _ask_gcloud(xla.tpu_name, xla.tpu_zone) if xla.tpu_name and "gcloud" in host.programs else None
    device = host.env.get("PJRT_DEVICE") or ("TPU" if host.device == "tpu" else None)
    return tpu_hosts.count(host.env) if device == "TPU" and not request.config.cpu else None


def _ask_gcloud(name: str, zone: str | None) -> int | None:
    """The network endpoints of a TPU, one for each of its machines; None where gcloud fails, as running it will tell why."""
    command = ["gcloud", "compute", "tpus", "tpu-vm", "describe", name, "--format", "json(networkEndpoints)", "--quiet"]
    command += ["--zone", zone] if zone else []
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, check=True)
        return len(json.loads(done.stdout)["networkEndpoints"]) or None
    except (OSError, subprocess.SubprocessError, ValueError, KeyError, TypeError):
        return None
