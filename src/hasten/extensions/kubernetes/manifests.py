"""Launch plans for Kubernetes: manifests of a JobSet or a TrainJob, one pod per machine."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

import yaml

from hasten.errors import ConfigError
from hasten.extensions.kubernetes.pods import PodPlan, plan_pods
from hasten.extensions.kubernetes.settings import KubernetesSettings
from hasten.launch.base import (
    Host,
    JobShape,
    LaunchPlan,
    LaunchRequest,
    LaunchTarget,
    PlannedFile,
    Proc,
    Submitter,
)
from hasten.launch.failure import PREEMPTED
from hasten.launch.torchrun import supervision

JsonObject = dict[str, Any]
"""An object of Kubernetes, or a part of one; Any: JSON values."""

_JOB: Final = "node"
"""Name of the replicated job of a JobSet, and of its container."""
_INDEX: Final = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
_JOBSET_LABEL: Final = "metadata.labels['jobset.sigs.k8s.io/{}']"
_TRAINER: Final = "trainer.kubeflow.org"


def plan_submit(request: LaunchRequest, host: Host) -> LaunchPlan:
    """Return a manifest that runs the program in the pods of a new job, and with `apply` the command that submits it.

    Raises: ConfigError for settings that cannot be honoured on Kubernetes.
    """
    pods = plan_pods(request)
    settings: KubernetesSettings = pods.settings
    path = f"{pods.name}-{settings.kind}.yaml"
    if settings.kind == "jobset":
        documents = [_jobset(pods)]
    else:
        documents = [_training_runtime(pods), _trainjob(pods)]
    text = "---\n".join(_yaml(document) for document in documents)
    header = (
        "# Written by `hasten launch --submit kubernetes`; docs/kubernetes.md explains the fields.\n"
        f"# Submit: kubectl apply -f {path}\n"
    )
    return LaunchPlan(
        launcher="kubernetes",
        procs=(Proc(("kubectl", "apply", "-f", path)),) if settings.apply else (),
        notes=_notes(pods, path),
        files=(PlannedFile(path, header + text, public=True),),
        supervision=supervision(request, JobShape(num_processes=pods.processes)),
        target=request.target,
        submitter=Submitter("kubectl", "leave --apply out to write the manifest only"),
    )


def _is_chosen(request: LaunchRequest) -> bool:
    is_chosen = request.config.launch.submit == "kubernetes"
    if request.config.section(KubernetesSettings).apply and not is_chosen:
        raise ConfigError(
            "kubernetes.apply submits a manifest, and none is written without submit. Add --submit kubernetes, or remove it."
        )
    return is_chosen


TARGET: Final = LaunchTarget(
    name="kubernetes",
    is_chosen=_is_chosen,
    plan=plan_submit,
    runs_in_image=True,
)


def _yaml(document: JsonObject) -> str:
    # or PyYAML would write parts that occur twice as aliases
    unshared = json.loads(json.dumps(document))
    return yaml.safe_dump(unshared, sort_keys=False, width=120)


def _notes(pods: PodPlan, path: str) -> tuple[str, ...]:
    notes = [
        f"{pods.num_pods} pod(s) with {pods.processes} process(es) and {pods.gpus} GPU(s) each, as a {pods.settings.kind}"
    ]
    if pods.settings.volume is None:
        notes.append(
            "no volume: checkpoints must be saved outside the pods (an object store), or they end with them"
        )
    if not pods.settings.apply:
        notes.append(f"submit it with `kubectl apply -f {path}`, or add --apply")
    return tuple(notes)


# -- the two kinds ---------------------------------------------------------------------------------------------------


def _jobset(pods: PodPlan) -> JsonObject:
    address = f"{pods.name}-{_JOB}-0-0.{pods.name}"
    env: list[JsonObject] = [
        {"name": "PET_NNODES", "value": str(pods.num_pods)},
        {"name": "PET_NPROC_PER_NODE", "value": str(pods.processes)},
        _from_field("PET_NODE_RANK", _INDEX),
        {"name": "PET_MASTER_ADDR", "value": address},
        {"name": "PET_MASTER_PORT", "value": str(pods.port)},
        _from_field("JOBSET_NAME", _JOBSET_LABEL.format("jobset-name")),
        _from_field("REPLICATED_JOB_NAME", _JOBSET_LABEL.format("replicatedjob-name")),
        _from_field("JOBSET_RESTART_ATTEMPT", _JOBSET_LABEL.format("restart-attempt")),
        *_env(pods),
    ]
    container: JsonObject = {
        "name": _JOB,
        "image": pods.settings.image,
        "command": _command(pods),
        "env": env,
        **_env_from(pods),
    }
    if resources := _resources(pods):
        container["resources"] = resources
    job = {
        "parallelism": pods.num_pods,
        "completions": pods.num_pods,
        "completionMode": "Indexed",
        **_job_policy(),
        "template": _pod_template(pods, container),
    }
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": _metadata(pods),
        "spec": _jobset_spec(pods, {"replicas": 1, "template": {"spec": job}}),
    }


def _training_runtime(pods: PodPlan) -> JsonObject:
    """Return the runtime of a TrainJob, which holds what a TrainJob itself cannot express: policies, volumes, the grace period."""
    container = {"name": _JOB, "image": pods.settings.image, **_env_from(pods)}
    metadata = _metadata(pods)
    metadata["labels"][f"{_TRAINER}/framework"] = "torch"
    template: JsonObject = {
        "metadata": {"labels": {f"{_TRAINER}/trainjob-ancestor-step": "trainer"}},
        "spec": {**_job_policy(), "template": _pod_template(pods, container)},
    }
    return {
        "apiVersion": f"{_TRAINER}/v1alpha1",
        "kind": "TrainingRuntime",
        "metadata": metadata,
        "spec": {
            "mlPolicy": {"numNodes": pods.num_pods, "torch": {}},
            "template": {"spec": _jobset_spec(pods, {"template": template})},
        },
    }


def _trainjob(pods: PodPlan) -> JsonObject:
    trainer: JsonObject = {
        "image": pods.settings.image,
        "command": _command(pods),
        "numNodes": pods.num_pods,
        "numProcPerNode": pods.processes,
    }
    if env := _env(pods):
        trainer["env"] = env
    if resources := _resources(pods):
        trainer["resourcesPerNode"] = resources
    runtime = {"apiGroup": _TRAINER, "kind": "TrainingRuntime", "name": pods.name}
    return {
        "apiVersion": f"{_TRAINER}/v1alpha1",
        "kind": "TrainJob",
        "metadata": _metadata(pods),
        "spec": {"runtimeRef": runtime, "trainer": trainer},
    }


# -- parts -----------------------------------------------------------------------------------------------------------


def _jobset_spec(pods: PodPlan, replicated_job: JsonObject) -> JsonObject:
    """Return the spec of a JobSet whose pods all restart after a failure."""
    return {
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
        "failurePolicy": {"maxRestarts": pods.max_restarts},
        "replicatedJobs": [{"name": _JOB, **replicated_job}],
    }


def _metadata(pods: PodPlan) -> JsonObject:
    settings: KubernetesSettings = pods.settings
    metadata: JsonObject = {"name": pods.name}
    if settings.namespace is not None:
        metadata["namespace"] = settings.namespace
    return metadata | _tags(pods)


def _tags(pods: PodPlan) -> JsonObject:
    """Return labels and annotations, which the job and its pods share."""
    labels = {
        "app.kubernetes.io/name": pods.name,
        "app.kubernetes.io/managed-by": "hasten",
        **_texts(pods.settings.labels),
    }
    annotations = _texts(pods.settings.annotations)
    return {"labels": labels, **({"annotations": annotations} if annotations else {})}


def _texts(values: Mapping[str, Any]) -> dict[str, str]:
    """Return the values as text; booleans as in YAML."""
    return {
        name: str(value).lower() if isinstance(value, bool) else str(value)
        for name, value in values.items()
    }


def _job_policy() -> JsonObject:
    """Return the policy of a Job: a pod that has saved (85) or was evicted is replaced, any other end fails the Job."""
    saved = {
        "action": "Ignore",
        "onExitCodes": {"operator": "In", "values": [PREEMPTED]},
    }
    evicted = {
        "action": "Ignore",
        "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
    }
    return {"backoffLimit": 0, "podFailurePolicy": {"rules": [saved, evicted]}}


def _pod_template(pods: PodPlan, container: JsonObject) -> JsonObject:
    settings: KubernetesSettings = pods.settings
    mounts = [{"name": "shared-memory", "mountPath": "/dev/shm"}]
    volumes: list[JsonObject] = [
        {"name": "shared-memory", "emptyDir": {"medium": "Memory"}}
    ]
    if settings.volume is not None:
        claim = {"claimName": settings.volume}
        volumes.append({"name": "checkpoints", "persistentVolumeClaim": claim})
        mounts.append({"name": "checkpoints", "mountPath": settings.volume_path})
    return {
        "metadata": _tags(pods),
        "spec": {
            "terminationGracePeriodSeconds": pods.grace_s,
            "restartPolicy": "Never",
            **settings.pod_spec,
            "containers": [{**container, "volumeMounts": mounts}],
            "volumes": volumes,
        },
    }


def _command(pods: PodPlan) -> list[str]:
    return [_literal(word) for word in pods.command]


def _literal(text: str) -> str:
    """Return the text such that Kubernetes, which expands `$(NAME)` and `$$`, passes it on as it was given."""
    return text.replace("$", "$$")


def _env(pods: PodPlan) -> list[JsonObject]:
    return [
        {"name": name, "value": _literal(text)}
        for name, text in _texts(pods.settings.env).items()
    ]


def _env_from(pods: PodPlan) -> JsonObject:
    sources = [{"secretRef": {"name": name}} for name in pods.settings.env_from]
    return {"envFrom": sources} if sources else {}


def _from_field(name: str, path: str) -> JsonObject:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def _resources(pods: PodPlan) -> JsonObject:
    """Return requests equal to limits, so that a pod is the last to be evicted."""
    amounts = _texts(pods.settings.resources)
    if pods.gpus:
        amounts[pods.settings.gpu_resource] = str(pods.gpus)
    return {"requests": dict(amounts), "limits": dict(amounts)} if amounts else {}
