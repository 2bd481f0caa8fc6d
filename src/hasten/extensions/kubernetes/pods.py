"""The pods of a job on Kubernetes: number, command and resources, decided from the settings. No torch, no YAML.

Names, labels and quantities are checked by the API server, which refuses invalid ones before a pod starts.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePath
from types import MappingProxyType
from typing import Any, Final

from hasten.config.handoff import unpack
from hasten.config.masking import masked, masked_tree, masked_value
from hasten.config.schema import BY_PATH
from hasten.config.sections.launch import LaunchConfig
from hasten.config.source import SettingEntry
from hasten.errors import ConfigError
from hasten.extensions.kubernetes.settings import KubernetesSettings
from hasten.launch.base import LaunchRequest
from hasten.launch.shape import split_range
from hasten.runtime.topology import DEFAULT_PORT

_GRACE_AFTER_STOP_S: Final = 30
_DEFAULT_RESTARTS: Final = 3
_DNS_LABEL: Final = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_LAUNCHER_VARIABLES: Final = frozenset(
    {
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "HASTEN_CONFIG",
    }
)
"""Variables that the manifest, the operator or the launcher sets."""
_MANIFEST_SETTINGS: Final = frozenset(
    ("launch", name)
    for name in (
        *("submit", "num_machines", "nnodes", "num_processes"),
        *("processes_per_machine", "main_process_port", "module", "no_python"),
    )
)
"""Settings that the manifest expresses otherwise, so that the command in a pod does not repeat them."""
_WRITTEN_FIELDS: Final = MappingProxyType(
    {
        "containers": "--kubernetes_image and the script",
        "volumes": "--kubernetes_volume",
        "restartPolicy": "the policy of the job",
        "terminationGracePeriodSeconds": "--stop_grace_s",
    }
)
"""Fields of a pod's spec that the manifest writes, and what decides them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PodPlan:
    """The pods of one job, as decided from the settings."""

    name: str
    settings: KubernetesSettings
    """Everything that is written into the manifest as it was given."""
    num_pods: int
    processes: int
    """Processes in a pod."""
    gpus: int
    command: tuple[str, ...]
    port: int
    grace_s: int
    max_restarts: int
    """Restarts of all pods after a failure."""


def plan_pods(request: LaunchRequest) -> PodPlan:
    """Return the pods that `request` describes.

    Raises: ConfigError for settings that cannot be honoured on Kubernetes, and for credentials in the manifest.
    """
    launch = request.config.launch
    settings = request.config.section(KubernetesSettings)
    _refuse_foreign(launch)
    fewest, most = split_range(launch.nnodes or str(launch.num_machines))
    if fewest != most:
        raise ConfigError(
            f"nnodes={launch.nnodes!r} asks for an elastic number of pods, but a {settings.kind} has a fixed one, so it would wait for all "
            f"{most}. Give --num_machines."
        )
    processes, gpus = _processes(launch, settings, most, on_cpu=request.config.cpu)
    name = settings.name or _default_name(request.target.name)
    if not _DNS_LABEL.fullmatch(name):
        raise ConfigError(
            f"kubernetes.name={name!r} is not a DNS label, which names the job's Service and its pods: lower-case letters, digits and "
            f"'-', starting with a letter and not ending with '-'. Correct --kubernetes_name."
        )
    _check_image(settings)
    _check_pod_spec(settings)
    _check_variables(settings.env)
    max_restarts = settings.max_restarts
    return PodPlan(
        name=name,
        settings=settings,
        num_pods=most,
        processes=processes,
        gpus=gpus,
        command=_command(request, processes),
        port=launch.main_process_port or DEFAULT_PORT,
        grace_s=int(launch.stop_grace_s) + _GRACE_AFTER_STOP_S,
        max_restarts=_DEFAULT_RESTARTS if max_restarts is None else max_restarts,
    )


def _refuse_foreign(launch: LaunchConfig) -> None:
    """Raise for settings of other launchers, and for those that the cluster decides."""
    defaults = LaunchConfig()
    reasons = {
        "machine_rank": "a pod's rank is its index",
        "main_process_ip": "the rendezvous is the host name of the first pod",
        "rdzv_endpoint": "the rendezvous is the host name of the first pod",
        "gpu_ids": "Kubernetes assigns the devices of a pod",
        "tpu": "the manifest requests GPUs or CPUs",
        "submit_options": "they are options of a batch script",
    }
    for name, reason in reasons.items():
        if getattr(launch, name) != getattr(defaults, name):
            raise ConfigError(
                f"{name}={getattr(launch, name)!r} is not supported with --submit kubernetes: {reason}. Remove {name}."
            )
    if launch.launcher not in ("auto", "torchrun"):
        raise ConfigError(
            f"launcher={launch.launcher} cannot start the processes of a pod, where no such launcher runs. Remove launcher."
        )


def _processes(
    launch: LaunchConfig, settings: KubernetesSettings, num_pods: int, *, on_cpu: bool
) -> tuple[int, int]:
    """Return the processes and the GPUs of each pod."""
    processes = launch.processes_per_machine
    if processes is None and launch.num_processes is not None:
        if launch.num_processes % num_pods:
            raise ConfigError(
                f"num_processes={launch.num_processes} cannot be split evenly over {num_pods} pods, so the number of "
                f"processes in a pod is unknown. Give --processes_per_machine."
            )
        processes = launch.num_processes // num_pods
    if on_cpu:
        if settings.gpus:
            raise ConfigError(
                f"cpu and kubernetes.gpus={settings.gpus} contradict each other: the GPUs would be reserved and not used. Remove one of them."
            )
        return processes or 1, 0
    processes = processes or settings.gpus
    if not processes:
        raise ConfigError(
            "neither GPUs nor a number of processes were given, and this machine's devices say nothing about a pod's. Give "
            "--kubernetes_gpus, or --cpu for training on CPUs."
        )
    gpus = processes if settings.gpus is None else settings.gpus
    if gpus < processes:
        raise ConfigError(
            f"{processes} processes in a pod with kubernetes.gpus={gpus}: two processes cannot share a GPU. Give --kubernetes_gpus "
            f"{processes}, fewer processes, or --cpu."
        )
    return processes, gpus


def _default_name(script: str) -> str:
    """Return the script's name as the name of a job: train_lm.py -> train-lm."""
    stem = re.sub(r"[^a-z0-9]+", "-", PurePath(script).stem.lower()).strip("-")
    return stem if _DNS_LABEL.fullmatch(stem) else f"job-{stem}".strip("-")


def _check_image(settings: KubernetesSettings) -> None:
    image = settings.image
    if image is None:
        raise ConfigError(
            "kubernetes.image was not given, so there is nothing that a pod could run. Give --kubernetes_image with the image that holds "
            "the script and hasten, such as registry.example/team/train:1."
        )
    if masked(image) != image:
        raise ConfigError(
            f"kubernetes.image={masked(image)!r} holds a credential, and a manifest is readable by others. Put it into a Secret and name "
            "that in imagePullSecrets of --kubernetes_pod_spec."
        )


def _check_pod_spec(settings: KubernetesSettings) -> None:
    """Raise for fields of a pod that the manifest writes itself, and for credentials in fields and annotations."""
    for name in settings.pod_spec:
        if name in _WRITTEN_FIELDS:
            raise ConfigError(
                f"kubernetes.pod_spec: {name} is written by the manifest, and two values would contradict each other. Remove it; "
                f"{_WRITTEN_FIELDS[name]} decides it."
            )
    fields = {
        "pod_spec": _without_label_keys(settings.pod_spec),
        "annotations": dict(settings.annotations),
    }
    for setting, value in fields.items():
        if masked_tree(value) != value:
            raise ConfigError(
                f"kubernetes.{setting} holds what looks like a credential, and a manifest is readable by others. Put it into a Secret."
            )


def _without_label_keys(value: Any) -> Any:  # Any: JSON values
    """Return the value without fields called `key`, which name a label or a taint in tolerations and affinities."""
    if isinstance(value, Mapping):
        return {
            name: _without_label_keys(field)
            for name, field in value.items()
            if name != "key"
        }
    if isinstance(value, list | tuple):
        return [_without_label_keys(element) for element in value]
    return value


def _check_variables(env: Mapping[str, Any]) -> None:
    for name, value in env.items():
        if name in _LAUNCHER_VARIABLES or name.startswith("PET_"):
            raise ConfigError(
                f"kubernetes.env: {name} is set by the manifest or by the launcher in the pod, and another value would contradict it. "
                f"Remove it."
            )
        if masked_value(name, value) != value:
            raise ConfigError(
                f"kubernetes.env: {name} looks like a credential, and a manifest is readable by others. Put it into a Secret and name "
                f"that in --kubernetes_env_from."
            )


def _command(request: LaunchRequest, processes: int) -> tuple[str, ...]:
    """Return the command of a pod: `hasten launch` with the settings as flags, whatever their source was here."""
    target = request.target
    arguments = shlex.join(target.args)
    if masked(arguments) != arguments:
        raise ConfigError(
            f"the script's arguments hold a credential ({masked(arguments)}), and a manifest is readable by others. Put it into a Secret, name "
            f"that in --kubernetes_env_from, and read the variable in the script."
        )
    return (
        request.config.section(KubernetesSettings).python,
        *("-m", "hasten", "launch"),
        f"--processes_per_machine={processes}",
        *_setting_flags(request.handoff),
        *["--module"] * target.module,
        *["--no_python"] * target.no_python,
        target.name,
        *target.args,
    )


def _setting_flags(handoff: str) -> Iterator[str]:
    """Yield the settings of a launch as flags, without those that the manifest expresses."""
    for entry in unpack(handoff) if handoff else ():
        is_manifest_section = entry.path[:2] == ("launch", "kubernetes")
        if entry.path in _MANIFEST_SETTINGS or is_manifest_section:
            continue
        if masked_value(entry.path[-1], entry.value) != entry.value:
            raise ConfigError(
                f"{entry.name} ({entry.source}) looks like a credential, and a manifest is readable by others. Put it into a Secret, name "
                f"that in --kubernetes_env_from, and remove the setting here."
            )
        yield f"--{BY_PATH[entry.path].flag}={_flag_text(entry)}"


def _flag_text(entry: SettingEntry) -> str:
    value = entry.value
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        separator = "\n" if BY_PATH[entry.path].meta.lines else ","
        return separator.join(map(str, value))
    if isinstance(value, Mapping):
        return json.dumps(value, separators=(",", ":"))
    return "none" if value is None else str(value)
