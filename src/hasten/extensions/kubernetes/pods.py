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

from hasten.config.handoff import unpack_settings
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
    launch_settings = request.config.launch
    settings = request.config.section(KubernetesSettings)
    _refuse_foreign(launch_settings)
    min_pods, max_pods = split_range(
        launch_settings.nnodes or str(launch_settings.num_machines)
    )
    if min_pods != max_pods:
        raise ConfigError(
            f"nnodes={launch_settings.nnodes!r} asks for an elastic number of pods, but a {settings.kind} has a fixed one, so it would wait for all "
            f"{max_pods}. Give --num_machines."
        )
    num_processes, num_gpus = _processes_and_gpus(
        launch_settings, settings, max_pods, on_cpu=request.config.cpu
    )
    job_name = settings.name or _default_name(request.target.name)
    if not _DNS_LABEL.fullmatch(job_name):
        raise ConfigError(
            f"kubernetes.name={job_name!r} is not a DNS label, which names the job's Service and its pods: lower-case letters, digits and "
            f"'-', starting with a letter and not ending with '-'. Correct --kubernetes_name."
        )
    _check_image(settings)
    _check_pod_spec(settings)
    _check_variables(settings.env)
    max_restarts = settings.max_restarts
    return PodPlan(
        name=job_name,
        settings=settings,
        num_pods=max_pods,
        processes=num_processes,
        gpus=num_gpus,
        command=_pod_command(request, num_processes),
        port=launch_settings.main_process_port or DEFAULT_PORT,
        grace_s=int(launch_settings.stop_grace_s) + _GRACE_AFTER_STOP_S,
        max_restarts=_DEFAULT_RESTARTS if max_restarts is None else max_restarts,
    )


def _refuse_foreign(launch_settings: LaunchConfig) -> None:
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
    for setting_name, reason in reasons.items():
        if getattr(launch_settings, setting_name) != getattr(defaults, setting_name):
            raise ConfigError(
                f"{setting_name}={getattr(launch_settings, setting_name)!r} is not supported with --submit kubernetes: {reason}. Remove {setting_name}."
            )
    if launch_settings.launcher not in ("auto", "torchrun"):
        raise ConfigError(
            f"launcher={launch_settings.launcher} cannot start the processes of a pod, where no such launcher runs. Remove launcher."
        )


def _processes_and_gpus(
    launch_settings: LaunchConfig,
    settings: KubernetesSettings,
    num_pods: int,
    *,
    on_cpu: bool,
) -> tuple[int, int]:
    """Return the processes and the GPUs of each pod."""
    num_processes = launch_settings.processes_per_machine
    if num_processes is None and launch_settings.num_processes is not None:
        if launch_settings.num_processes % num_pods:
            raise ConfigError(
                f"num_processes={launch_settings.num_processes} cannot be split evenly over {num_pods} pods, so the number of "
                f"processes in a pod is unknown. Give --processes_per_machine."
            )
        num_processes = launch_settings.num_processes // num_pods
    if on_cpu:
        if settings.gpus:
            raise ConfigError(
                f"cpu and kubernetes.gpus={settings.gpus} contradict each other: the GPUs would be reserved and not used. Remove one of them."
            )
        return num_processes or 1, 0
    num_processes = num_processes or settings.gpus
    if not num_processes:
        raise ConfigError(
            "neither GPUs nor a number of processes were given, and this machine's devices say nothing about a pod's. Give "
            "--kubernetes_gpus, or --cpu for training on CPUs."
        )
    num_gpus = num_processes if settings.gpus is None else settings.gpus
    if num_gpus < num_processes:
        raise ConfigError(
            f"{num_processes} processes in a pod with kubernetes.gpus={num_gpus}: two processes cannot share a GPU. Give --kubernetes_gpus "
            f"{num_processes}, fewer processes, or --cpu."
        )
    return num_processes, num_gpus


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
    for field_name, field_value in settings.pod_spec.items():
        if isinstance(field_value, str) and field_value.lstrip()[:1] in ("[", "{"):
            raise ConfigError(
                f"kubernetes.pod_spec: {field_name} is the text {field_value!r:.60}, and Kubernetes takes no JSON in text. Give all fields as one "
                f"JSON object: --kubernetes_pod_spec '{{\"{field_name}\": ...}}'."
            )
        if field_name in _WRITTEN_FIELDS:
            raise ConfigError(
                f"kubernetes.pod_spec: {field_name} is written by the manifest, and two values would contradict each other. Remove it; "
                f"{_WRITTEN_FIELDS[field_name]} decides it."
            )
    checked_fields = {
        "pod_spec": _without_label_keys(settings.pod_spec),
        "annotations": dict(settings.annotations),
    }
    for setting_name, json_value in checked_fields.items():
        if masked_tree(json_value) != json_value:
            raise ConfigError(
                f"kubernetes.{setting_name} holds what looks like a credential, and a manifest is readable by others. Put it into a Secret."
            )


def _without_label_keys(json_value: Any) -> Any:  # Any: JSON values
    """Return the value without fields called `key`, which name a label or a taint in tolerations and affinities."""
    if isinstance(json_value, Mapping):
        return {
            field_name: _without_label_keys(field_value)
            for field_name, field_value in json_value.items()
            if field_name != "key"
        }
    if isinstance(json_value, list | tuple):
        return list(map(_without_label_keys, json_value))
    return json_value


def _check_variables(env: Mapping[str, Any]) -> None:
    for variable_name, variable_value in env.items():
        if variable_name in _LAUNCHER_VARIABLES or variable_name.startswith("PET_"):
            raise ConfigError(
                f"kubernetes.env: {variable_name} is set by the manifest or by the launcher in the pod, and another value would contradict it. "
                f"Remove it."
            )
        if masked_value(variable_name, variable_value) != variable_value:
            raise ConfigError(
                f"kubernetes.env: {variable_name} looks like a credential, and a manifest is readable by others. Put it into a Secret and name "
                f"that in --kubernetes_env_from."
            )


def _pod_command(request: LaunchRequest, processes: int) -> tuple[str, ...]:
    """Return the command of a pod: `hasten launch` with the settings as flags, whatever their source was here."""
    target = request.target
    program_arguments = shlex.join(target.args)
    if masked(program_arguments) != program_arguments:
        raise ConfigError(
            f"the script's arguments hold a credential ({masked(program_arguments)}), and a manifest is readable by others. Put it into a Secret, name "
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
    for setting_entry in unpack_settings(handoff) if handoff else ():
        is_manifest_section = setting_entry.path[:2] == ("launch", "kubernetes")
        if setting_entry.path in _MANIFEST_SETTINGS or is_manifest_section:
            continue
        if (
            masked_value(setting_entry.path[-1], setting_entry.value)
            != setting_entry.value
        ):
            raise ConfigError(
                f"{setting_entry.name} ({setting_entry.source}) looks like a credential, and a manifest is readable by others. Put it into a Secret, name "
                f"that in --kubernetes_env_from, and remove the setting here."
            )
        yield f"--{BY_PATH[setting_entry.path].flag}={_flag_text(setting_entry)}"


def _flag_text(setting_entry: SettingEntry) -> str:
    setting_value = setting_entry.value
    if isinstance(setting_value, bool):
        return str(setting_value).lower()
    if isinstance(setting_value, list):
        separator = "\n" if BY_PATH[setting_entry.path].meta.lines else ","
        return separator.join(map(str, setting_value))
    if isinstance(setting_value, Mapping):
        return json.dumps(setting_value, separators=(",", ":"))
    return "none" if setting_value is None else str(setting_value)
