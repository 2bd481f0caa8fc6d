"""The pods of a job on Kubernetes: number, command, resources and names, decided from the settings and checked. No torch, no YAML."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePath, PurePosixPath
from types import MappingProxyType
from typing import Any, Final

from hasten.config.handoff import unpack
from hasten.config.masking import masked, masked_tree, masked_value
from hasten.config.schema import BY_PATH
from hasten.config.sections.launch import LaunchConfig
from hasten.config.source import SettingEntry
from hasten.errors import ConfigError
from hasten.extensions.kubernetes.settings import KubernetesSettings
from hasten.launch import network
from hasten.launch.base import LaunchRequest
from hasten.launch.failure import PREEMPTED, STALLED
from hasten.launch.shape import split_range
from hasten.runtime.topology import DEFAULT_PORT

RETRIED: Final = MappingProxyType({PREEMPTED: 143, STALLED: 134})
"""Exit codes of a PyTorchJob's pods that its operator retries: those above 127."""

_GRACE_AFTER_STOP_S: Final = 30
_RESTARTS: Final = 3
_LABEL: Final = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_SUBDOMAIN: Final = re.compile(
    r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*"
)
_TAG: Final = re.compile(r"([A-Za-z0-9]([-_.A-Za-z0-9]{0,61}[A-Za-z0-9])?)?")
_CPU: Final = re.compile(r"[0-9]+(\.[0-9]{1,3})?|[0-9]+m")
_BYTES: Final = re.compile(r"([0-9]+(?:\.[0-9]+)?)([KMGTP]i|[kMGTP])?")
_IMAGE: Final = re.compile(
    r"[A-Za-z0-9][\w.-]*(:[0-9]+(?=/))?(/[\w.-]+)*(:[\w.-]+)?(@\w+:[0-9a-fA-F]{32,})?"
)
"""A name with optional registry, tag and digest; a user and a password have no place in it."""
_QUANTITY: Final = re.compile(r"[0-9]+(\.[0-9]+)?([KMGTP]i|[mkMGTP])?")
_VARIABLE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_UNITS: Final = MappingProxyType(
    {"": 1}
    | {f"{letter}i": 1024**power for power, letter in enumerate("KMGTP", 1)}
    | {letter: 1000**power for power, letter in enumerate("kMGTP", 1)}
)
_OWNED: Final = frozenset(
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
_DECIDED: Final = frozenset(
    ("launch", name)
    for name in (
        *(
            "submit",
            "num_machines",
            "nnodes",
            "num_processes",
            "processes_per_machine",
            "main_process_port",
        ),
        *("module", "no_python"),
    )
)
"""Settings that the manifest expresses otherwise, so that the command in a pod does not repeat them."""
_LONGEST: Final = 63
_WRITTEN: Final = MappingProxyType(
    {
        "containers": "--kubernetes_image and the script",
        "volumes": "--kubernetes_volume",
        "restartPolicy": "--kubernetes_on_stall",
        "terminationGracePeriodSeconds": "--kubernetes_grace_s",
        "serviceAccountName": "--kubernetes_service_account",
        "imagePullSecrets": "--kubernetes_pull_from",
        "nodeSelector": "--kubernetes_node_selector",
    }
)
"""Fields of a pod's spec that the manifest writes, and what decides them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PodPlan:
    """The pods of one job, as decided from the settings."""

    name: str
    settings: KubernetesSettings
    """Everything that is written into the manifest as it was given."""
    min_pods: int
    max_pods: int
    processes: int
    """Processes in a pod."""
    gpus: int
    command: tuple[str, ...]
    port: int
    grace_s: int
    max_restarts: int
    """Restarts of all pods after a failure."""
    pod_restarts: int
    """Restarts of the processes inside the pods."""
    serves_metrics: bool = False
    scrape_port: int | None = None
    """Port at which Prometheus reaches the metrics of a pod's first process; None if it cannot."""

    @property
    def elastic(self) -> bool:
        """True if the number of pods may change."""
        return self.min_pods != self.max_pods


def plan_pods(request: LaunchRequest) -> PodPlan:
    """Return the pods that `request` describes.

    Raises: ConfigError for settings that Kubernetes would refuse, or that cannot be honoured there.
    """
    config, launch, settings = (
        request.config,
        request.config.launch,
        request.config.section(KubernetesSettings),
    )
    _refuse_foreign(launch)
    low, high = (
        split_range(launch.nnodes)
        if launch.nnodes
        else (launch.num_machines, launch.num_machines)
    )
    if low != high and settings.kind != "pytorchjob":
        raise ConfigError(
            f"nnodes={launch.nnodes!r} asks for an elastic number of pods, but a {settings.kind} has a fixed one, so it would wait for all "
            f"{high}. Give --num_machines, or --kind pytorchjob, whose elasticPolicy supports it."
        )
    processes, gpus = _processes(launch, settings, high, on_cpu=config.cpu)
    name = settings.name or _default_name(request.target.name)
    _check_name(name, settings, high)
    _check_settings(settings)
    # Any: settings of another extension
    metrics: Any = getattr(config, "metrics", None)
    serves_metrics = metrics is not None and metrics.port is not None
    return PodPlan(
        name=name,
        settings=settings,
        min_pods=low,
        max_pods=high,
        processes=processes,
        gpus=gpus,
        command=_command(request, processes),
        port=_port(launch),
        grace_s=_grace_s(launch, settings),
        max_restarts=_max_restarts(settings),
        pod_restarts=launch.max_restarts,
        serves_metrics=serves_metrics,
        scrape_port=metrics.port or None
        if serves_metrics and not network.is_loopback(metrics.host)
        else None,
    )


def _refuse_foreign(launch: LaunchConfig) -> None:
    """Raise for settings of other launchers, and for those that the cluster decides."""
    plain = LaunchConfig()
    decided = {
        "machine_rank": "a pod's rank is its index",
        "main_process_ip": "the rendezvous is the host name of the first pod",
        "rdzv_endpoint": "the rendezvous is the host name of the first pod",
        "gpu_ids": "Kubernetes assigns the devices of a pod",
        "tpu": "the manifest requests GPUs or CPUs",
        "submit_options": "they are options of a batch script",
        "exit_codes": "the manifest maps exit codes itself",
    }
    for name, why in decided.items():
        if getattr(launch, name) != getattr(plain, name):
            raise ConfigError(
                f"{name}={getattr(launch, name)!r} is not supported with --submit kubernetes: {why}. Remove {name}."
            )
    if launch.launcher not in ("auto", "torchrun"):
        raise ConfigError(
            f"launcher={launch.launcher} cannot start the processes of a pod, where no such launcher runs. Remove launcher."
        )


def _processes(
    launch: LaunchConfig, settings: KubernetesSettings, pods: int, *, on_cpu: bool
) -> tuple[int, int]:
    """Return the processes and the GPUs of each pod."""
    processes = launch.processes_per_machine
    if processes is None and launch.num_processes is not None:
        if launch.nnodes or launch.num_processes % pods:
            raise ConfigError(
                f"num_processes={launch.num_processes} cannot be split evenly over {launch.nnodes or pods} pods, so the number of "
                f"processes in a pod is unknown. Give --processes_per_machine."
            )
        processes = launch.num_processes // pods
    if on_cpu and settings.gpus:
        raise ConfigError(
            f"cpu and kubernetes.gpus={settings.gpus} contradict each other: the GPUs would be reserved and not used. Remove one of them."
        )
    if on_cpu:
        return processes or 1, 0
    if processes is None and not settings.gpus:
        raise ConfigError(
            "neither GPUs nor a number of processes were given, and this machine's devices say nothing about a pod's. Give "
            "--kubernetes_gpus, or --cpu for training on CPUs."
        )
    processes = processes or settings.gpus or 1
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
    return stem if _LABEL.fullmatch(stem) else f"job-{stem}".strip("-")


def _check_name(name: str, settings: KubernetesSettings, pods: int) -> None:
    """Raise unless the names of the job, of its Service and of its pods are valid."""
    if not _LABEL.fullmatch(name):
        raise ConfigError(
            f"kubernetes.name={name!r} is not a DNS label, which names the job's Service and its pods: lower-case letters, digits and "
            f"'-', starting with a letter and not ending with '-'. Correct --kubernetes_name."
        )
    last = (
        f"-worker-{pods - 1}"
        if settings.kind == "pytorchjob"
        else f"-node-0-{pods - 1}-12345"
    )
    if len(name) + len(last) > _LONGEST:
        raise ConfigError(
            f"kubernetes.name={name!r} is too long: its pods would be called {name}{last}, and Kubernetes accepts {_LONGEST} characters. "
            f"Use at most {_LONGEST - len(last)} characters in --kubernetes_name."
        )


def _check_settings(settings: KubernetesSettings) -> None:
    if settings.image is None or not _IMAGE.fullmatch(settings.image):
        image_text = (
            " was not given"
            if settings.image is None
            else f"={masked(settings.image)!r} is not the name of an image"
        )
        raise ConfigError(
            f"kubernetes.image{image_text}, so there is nothing that a pod could run. Give --kubernetes_image with the image that holds the "
            f"script and hasten, such as registry.example/team/train:1; credentials of the registry belong into a Secret named in "
            f"--kubernetes_pull_from."
        )
    _check_objects(settings)
    _check_tags("labels", settings.labels)
    _check_tags("node_selector", settings.node_selector)
    _check_tags("annotations", dict.fromkeys(settings.annotations, ""))
    _check_pod_spec(settings)
    _check_amounts(settings)
    _check_variables(settings.env)
    for name in ("volume_path", "working_dir"):
        path = getattr(settings, name)
        if path is not None and (not PurePosixPath(path).is_absolute() or ":" in path):
            raise ConfigError(
                f"kubernetes.{name}={path!r} is not an absolute path without ':', so it names no folder of a pod. Write it from '/', "
                f"such as /checkpoints."
            )
    if settings.volume is not None and PurePosixPath(settings.volume_path) in map(
        PurePosixPath, ("/", "/dev/shm")
    ):
        raise ConfigError(
            f"kubernetes.volume_path={settings.volume_path!r} would hide files that every pod needs. Choose a folder such as /checkpoints."
        )


def _check_pod_spec(settings: KubernetesSettings) -> None:
    """Raise for fields of a pod that the manifest writes itself, and for credentials in fields and annotations."""
    for name in settings.pod_spec:
        if name in _WRITTEN:
            raise ConfigError(
                f"kubernetes.pod_spec: {name} is written by the manifest, and two values would contradict each other. Remove it; "
                f"{_WRITTEN[name]} decides it."
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
            name: _without_label_keys(item)
            for name, item in value.items()
            if name != "key"
        }
    if isinstance(value, list | tuple):
        return [_without_label_keys(item) for item in value]
    return value


def _check_objects(settings: KubernetesSettings) -> None:
    """Raise unless the names of other objects are valid."""
    named: list[tuple[str, str | None]] = [
        *((name, getattr(settings, name)) for name in ("service_account", "volume")),
        *(("env_from", name) for name in settings.env_from),
        *(("pull_from", name) for name in settings.pull_from),
    ]
    for setting, name in named:
        if name is not None and (len(name) > 253 or not _SUBDOMAIN.fullmatch(name)):
            raise ConfigError(
                f"kubernetes.{setting}={name!r} is not a DNS-1123 name, so no object can be called that: lower-case letters, digits, '-' "
                f"and '.', starting and ending with a letter or digit. Correct it."
            )
    space = settings.namespace
    if space is not None and (
        len(space) > _LONGEST or "." in space or not _SUBDOMAIN.fullmatch(space)
    ):
        raise ConfigError(
            f"kubernetes.namespace={space!r} is not a DNS-1123 label, so no namespace can be called that: at most {_LONGEST} lower-case "
            f"letters, digits and '-'. Correct --kubernetes_namespace."
        )


def _check_tags(setting: str, tags: Mapping[str, Any]) -> None:
    """Raise unless these are valid labels of Kubernetes."""
    for key, value in tags.items():
        prefix, slash, name = key.rpartition("/")
        fits = (
            bool(name)
            and bool(_TAG.fullmatch(name))
            and bool(_TAG.fullmatch(tag_text(value)))
        )
        if not fits or (slash and not _SUBDOMAIN.fullmatch(prefix)):
            raise ConfigError(
                f"kubernetes.{setting}: {key}={value} is not a label of Kubernetes, which would refuse the job: at most {_LONGEST} "
                f"letters, digits, '-', '_' and '.', the key with an optional domain and '/'. Correct it."
            )


def tag_text(value: object) -> str:
    """Return a label's or variable's value as text; booleans as in YAML."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _check_amounts(settings: KubernetesSettings) -> None:
    if settings.cpu is not None and not _CPU.fullmatch(settings.cpu):
        raise ConfigError(
            f"kubernetes.cpu={settings.cpu!r} is not a quantity of CPUs, so nothing could be reserved. Write 8, 0.5 or 500m."
        )
    sizes = {}
    for name in ("memory", "shared_memory"):
        text = getattr(settings, name)
        if text is None:
            continue
        if (amount_match := _BYTES.fullmatch(text)) is None or not float(
            amount_match[1]
        ):
            raise ConfigError(
                f"kubernetes.{name}={text!r} is not a quantity of memory, so nothing could be reserved. Write 64Gi, 512Mi or 100G."
            )
        sizes[name] = float(amount_match[1]) * _UNITS[amount_match[2] or ""]
    if sizes.get("shared_memory", 0.0) > sizes.get("memory", float("inf")):
        raise ConfigError(
            f"kubernetes.shared_memory={settings.shared_memory} exceeds kubernetes.memory={settings.memory}, in which /dev/shm is counted: the "
            f"pod would be killed before the limit is reached. Lower shared_memory, or raise memory."
        )
    _check_tags("gpu_resource", {settings.gpu_resource: ""})
    _check_tags("resources", dict.fromkeys(settings.resources, ""))
    for name, amount in settings.resources.items():
        if name in ("cpu", "memory", settings.gpu_resource) or not _QUANTITY.fullmatch(
            str(amount)
        ):
            raise ConfigError(
                f"kubernetes.resources: {name}={amount} is not a quantity of a further resource. Write rdma/hca=1; CPUs, memory and GPUs "
                f"have --kubernetes_cpu, --kubernetes_memory and --kubernetes_gpus."
            )


def _check_variables(env: Mapping[str, Any]) -> None:
    for name, value in env.items():
        if not _VARIABLE.fullmatch(name):
            raise ConfigError(
                f"kubernetes.env: {name!r} is not the name of a variable, and Kubernetes would refuse the pod. Use letters, digits and "
                f"'_', such as NCCL_DEBUG=WARN."
            )
        if name in _OWNED or name.startswith("PET_"):
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
    target, settings = request.target, request.config.section(KubernetesSettings)
    flags = [f"--processes_per_machine={processes}", *_flags(request.handoff)]
    if settings.kind == "pytorchjob":
        codes = [PREEMPTED, *([STALLED] if settings.on_stall == "restart" else [])]
        flags.append(
            "--exit_codes=" + ",".join(f"{code}={RETRIED[code]}" for code in codes)
        )
    flags += ["--module"] * target.module + ["--no_python"] * target.no_python
    words = shlex.join(target.args)
    if masked(words) != words:
        raise ConfigError(
            f"the script's arguments hold a credential ({masked(words)}), and a manifest is readable by others. Put it into a Secret, name "
            f"that in --kubernetes_env_from, and read the variable in the script."
        )
    return (
        settings.python,
        "-m",
        "hasten",
        "launch",
        *flags,
        target.name,
        *target.args,
    )


def _flags(handoff: str) -> Iterator[str]:
    """Yield the settings of a launch as flags, without those that the manifest expresses."""
    for entry in unpack(handoff) if handoff else ():
        if entry.path in _DECIDED or entry.path[:2] == ("launch", "kubernetes"):
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
        return ("\n" if BY_PATH[entry.path].meta.lines else ",").join(map(str, value))
    if isinstance(value, Mapping):
        return json.dumps(value, separators=(",", ":"))
    return "none" if value is None else str(value)


def _port(launch: LaunchConfig) -> int:
    port = (
        DEFAULT_PORT if launch.main_process_port is None else launch.main_process_port
    )
    if port < 1024:
        raise ConfigError(
            f"main_process_port={port} cannot be the rendezvous of pods, which must know it beforehand and may not open ports below 1024. "
            f"Choose one from 1024 to 65535, or remove it for {DEFAULT_PORT}."
        )
    return port


def _grace_s(launch: LaunchConfig, settings: KubernetesSettings) -> int:
    """Return terminationGracePeriodSeconds, which is longer than the launcher gives its processes to save."""
    if settings.grace_s is None:
        return int(launch.stop_grace_s) + _GRACE_AFTER_STOP_S
    if settings.grace_s <= launch.stop_grace_s:
        raise ConfigError(
            f"kubernetes.grace_s={settings.grace_s} does not exceed stop_grace_s={launch.stop_grace_s:g}: Kubernetes would kill a pod while "
            f"its processes may still be saving. Raise grace_s above it, or lower --stop_grace_s."
        )
    return settings.grace_s


def _max_restarts(settings: KubernetesSettings) -> int:
    if settings.kind == "pytorchjob" and settings.max_restarts is not None:
        raise ConfigError(
            f"kubernetes.max_restarts={settings.max_restarts} has no counterpart in a PyTorchJob, which restarts pods by their exit code. "
            f"Remove it; --max_restarts restarts the processes inside the pods."
        )
    return _RESTARTS if settings.max_restarts is None else settings.max_restarts
