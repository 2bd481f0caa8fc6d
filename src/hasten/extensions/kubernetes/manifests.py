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
    manifest_path = f"{pods.name}-{settings.kind}.yaml"
    if settings.kind == "jobset":
        documents = [_jobset_object(pods)]
    else:
        documents = [_training_runtime(pods), _trainjob_object(pods)]
    manifest_text = "---\n".join(map(_dump_yaml, documents))
    header = (
        "# Written by `hasten launch --submit kubernetes`; docs/kubernetes.md explains the fields.\n"
        f"# Submit: kubectl apply -f {manifest_path}\n"
    )
    apply_command = Proc(("kubectl", "apply", "-f", manifest_path))
    return LaunchPlan(
        launcher="kubernetes",
        procs=(apply_command,) if settings.apply else (),
        notes=_plan_notes(pods, manifest_path),
        files=(PlannedFile(manifest_path, header + manifest_text, public=True),),
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


def _dump_yaml(document: JsonObject) -> str:
    # or PyYAML would write parts that occur twice as aliases
    unshared = json.loads(json.dumps(document))
    return yaml.safe_dump(unshared, sort_keys=False, width=120)


def _plan_notes(pods: PodPlan, path: str) -> tuple[str, ...]:
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


def _jobset_object(pods: PodPlan) -> JsonObject:
    first_pod = f"{pods.name}-{_JOB}-0-0.{pods.name}"
    variables: list[JsonObject] = [
        {"name": "PET_NNODES", "value": str(pods.num_pods)},
        {"name": "PET_NPROC_PER_NODE", "value": str(pods.processes)},
        _from_field("PET_NODE_RANK", _INDEX),
        {"name": "PET_MASTER_ADDR", "value": first_pod},
        {"name": "PET_MASTER_PORT", "value": str(pods.port)},
        _from_field("JOBSET_NAME", _JOBSET_LABEL.format("jobset-name")),
        _from_field("REPLICATED_JOB_NAME", _JOBSET_LABEL.format("replicatedjob-name")),
        _from_field("JOBSET_RESTART_ATTEMPT", _JOBSET_LABEL.format("restart-attempt")),
        *_user_variables(pods),
    ]
    container: JsonObject = {
        "name": _JOB,
        "image": pods.settings.image,
        "command": _escaped_command(pods),
        "env": variables,
        **_secret_variables(pods),
    }
    if resources := _pod_resources(pods):
        container["resources"] = resources
    job_spec = {
        "parallelism": pods.num_pods,
        "completions": pods.num_pods,
        "completionMode": "Indexed",
        **_job_policy(),
        "template": _pod_template(pods, container),
    }
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": _object_metadata(pods),
        "spec": _jobset_spec(pods, {"replicas": 1, "template": {"spec": job_spec}}),
    }


def _training_runtime(pods: PodPlan) -> JsonObject:
    """Return the runtime of a TrainJob, which holds what a TrainJob itself cannot express: policies, volumes, the grace period."""
    container = {"name": _JOB, "image": pods.settings.image, **_secret_variables(pods)}
    metadata = _object_metadata(pods)
    metadata["labels"][f"{_TRAINER}/framework"] = "torch"
    job_template: JsonObject = {
        "metadata": {"labels": {f"{_TRAINER}/trainjob-ancestor-step": "trainer"}},
        "spec": {**_job_policy(), "template": _pod_template(pods, container)},
    }
    return {
        "apiVersion": f"{_TRAINER}/v1alpha1",
        "kind": "TrainingRuntime",
        "metadata": metadata,
        "spec": {
            "mlPolicy": {"numNodes": pods.num_pods, "torch": {}},
            "template": {"spec": _jobset_spec(pods, {"template": job_template})},
        },
    }


def _trainjob_object(pods: PodPlan) -> JsonObject:
    trainer: JsonObject = {
        "image": pods.settings.image,
        "command": _escaped_command(pods),
        "numNodes": pods.num_pods,
        "numProcPerNode": pods.processes,
    }
    if variables := _user_variables(pods):
        trainer["env"] = variables
    if resources := _pod_resources(pods):
        trainer["resourcesPerNode"] = resources
    runtime_ref = {"apiGroup": _TRAINER, "kind": "TrainingRuntime", "name": pods.name}
    return {
        "apiVersion": f"{_TRAINER}/v1alpha1",
        "kind": "TrainJob",
        "metadata": _object_metadata(pods),
        "spec": {"runtimeRef": runtime_ref, "trainer": trainer},
    }


# -- parts -----------------------------------------------------------------------------------------------------------


def _jobset_spec(pods: PodPlan, replicated_job: JsonObject) -> JsonObject:
    """Return the spec of a JobSet whose pods all restart after a failure."""
    return {
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
        "failurePolicy": {"maxRestarts": pods.max_restarts},
        "replicatedJobs": [{"name": _JOB, **replicated_job}],
    }


def _object_metadata(pods: PodPlan) -> JsonObject:
    settings: KubernetesSettings = pods.settings
    metadata: JsonObject = {"name": pods.name}
    if settings.namespace is not None:
        metadata["namespace"] = settings.namespace
    return metadata | _labels_and_annotations(pods)


def _labels_and_annotations(pods: PodPlan) -> JsonObject:
    """Return labels and annotations, which the job and its pods share."""
    labels = {
        "app.kubernetes.io/name": pods.name,
        "app.kubernetes.io/managed-by": "hasten",
        **_tag_texts(pods.settings.labels),
    }
    annotations = _tag_texts(pods.settings.annotations)
    return {"labels": labels, **({"annotations": annotations} if annotations else {})}


def _tag_texts(values: Mapping[str, Any]) -> dict[str, str]:
    """Return the values as text; booleans as in YAML."""
    texts = {}
    for tag_name, tag_value in values.items():
        is_flag = isinstance(tag_value, bool)
        texts[tag_name] = str(tag_value).lower() if is_flag else str(tag_value)
    return texts


def _job_policy() -> JsonObject:
    """Return the policy of a Job: a pod that has saved (85) or was evicted is replaced, any other end fails the Job."""
    saved_rule = {
        "action": "Ignore",
        "onExitCodes": {"operator": "In", "values": [PREEMPTED]},
    }
    evicted_rule = {
        "action": "Ignore",
        "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
    }
    return {
        "backoffLimit": 0,
        "podFailurePolicy": {"rules": [saved_rule, evicted_rule]},
    }


def _pod_template(pods: PodPlan, container: JsonObject) -> JsonObject:
    settings: KubernetesSettings = pods.settings
    volume_mounts = [{"name": "shared-memory", "mountPath": "/dev/shm"}]
    pod_volumes: list[JsonObject] = [
        {"name": "shared-memory", "emptyDir": {"medium": "Memory"}}
    ]
    if settings.volume is not None:
        volume_claim = {"claimName": settings.volume}
        pod_volumes.append(
            {"name": "checkpoints", "persistentVolumeClaim": volume_claim}
        )
        volume_mounts.append({"name": "checkpoints", "mountPath": settings.volume_path})
    return {
        "metadata": _labels_and_annotations(pods),
        "spec": {
            "terminationGracePeriodSeconds": pods.grace_s,
            "restartPolicy": "Never",
            **settings.pod_spec,
            "containers": [{**container, "volumeMounts": volume_mounts}],
            "volumes": pod_volumes,
        },
    }


def _escaped_command(pods: PodPlan) -> list[str]:
    return list(map(_escape_dollars, pods.command))


def _escape_dollars(text: str) -> str:
    """Return the text such that Kubernetes, which expands `$(NAME)` and `$$`, passes it on as it was given."""
    return text.replace("$", "$$")


def _user_variables(pods: PodPlan) -> list[JsonObject]:
    return [
        {"name": variable_name, "value": _escape_dollars(variable_text)}
        for variable_name, variable_text in _tag_texts(pods.settings.env).items()
    ]


def _secret_variables(pods: PodPlan) -> JsonObject:
    secret_sources = [
        {"secretRef": {"name": secret_name}} for secret_name in pods.settings.env_from
    ]
    return {"envFrom": secret_sources} if secret_sources else {}


def _from_field(name: str, path: str) -> JsonObject:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def _pod_resources(pods: PodPlan) -> JsonObject:
    """Return requests equal to limits, so that a pod is the last to be evicted."""
    resource_amounts = _tag_texts(pods.settings.resources)
    if pods.gpus:
        resource_amounts[pods.settings.gpu_resource] = str(pods.gpus)
    if resource_amounts:
        return {"requests": dict(resource_amounts), "limits": dict(resource_amounts)}
    return {}
