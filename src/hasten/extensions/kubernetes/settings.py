"""Settings of jobs on Kubernetes: the object to create, its pods, and what happens when a pod ends."""

from collections.abc import Mapping
from typing import Any, Literal

from hasten.config.base import Section, SectionNames, setting, settings

KubernetesKind = Literal["jobset", "trainjob"]


@settings
class KubernetesSettings(Section):
    """The job that `--submit kubernetes` describes, and its pods."""

    section_names = SectionNames(flag_group="Kubernetes")

    kind: KubernetesKind = setting(
        "jobset",
        "the object to create: a JobSet, or Kubeflow's TrainJob",
        flags=("kind",),
    )
    apply: bool = setting(
        False,
        "submit the manifest with kubectl; else it is only written",
        flags=("apply",),
    )
    image: str | None = setting(
        None, "container image, with hasten and the script in it"
    )
    name: str | None = setting(None, "name of the job (default: the script's name)")
    namespace: str | None = setting(
        None, "namespace of the job (default: that of kubectl's context)"
    )
    labels: Mapping[str, Any] = setting(
        factory=dict, help="labels of the job and its pods, such as a queue's name"
    )
    annotations: Mapping[str, Any] = setting(
        factory=dict, help="annotations of the job and its pods"
    )
    pod_spec: Mapping[str, Any] = setting(
        factory=dict,
        help="further fields of the pods' spec as JSON, such as tolerations, nodeSelector and imagePullSecrets",
    )
    gpus: int | None = setting(
        None, "GPUs of a pod (default: one for each of its processes)", minimum=0
    )
    gpu_resource: str = setting("nvidia.com/gpu", "resource name of a GPU")
    resources: Mapping[str, Any] = setting(
        factory=dict,
        help="resources of a pod other than GPUs, such as cpu=8,memory=64Gi",
    )
    volume: str | None = setting(
        None, "claim of the volume for checkpoints, which all pods mount"
    )
    volume_path: str = setting("/checkpoints", "path at which pods mount the volume")
    python: str = setting("python", "the image's Python")
    env: Mapping[str, Any] = setting(
        factory=dict, help="environment variables of the pods; not for credentials"
    )
    env_from: tuple[str, ...] = setting(
        (), "names of Secrets whose keys become environment variables of the pods"
    )
    max_restarts: int | None = setting(
        None,
        "restarts of all pods after a failure, not counting preemptions (default: 3)",
        minimum=0,
    )
