"""Launch plans for Kubernetes: manifests of a JobSet, a TrainJob or a PyTorchJob, one pod per machine."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final, assert_never

import yaml

from hasten.errors import ConfigError
from hasten.extensions.kubernetes.pods import PodPlan, plan_pods, tag_text
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
from hasten.launch.failure import PREEMPTED, STALLED
from hasten.launch.torchrun import supervision

JsonObject = dict[str, Any]
"""An object of Kubernetes, or a part of one; Any: JSON values."""

_JOB: Final = "node"
"""Name of the replicated job of a JobSet, and of its container."""
_PYTORCH: Final = "pytorch"
"""Name that the training operator requires of the container."""
_PYTORCH_PORT: Final = "pytorchjob-port"
_INDEX: Final = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
_JOBSET_LABEL: Final = "metadata.labels['jobset.sigs.k8s.io/{}']"
_TRAINER: Final = "trainer.kubeflow.org"


def plan_submit(request: LaunchRequest, host: Host) -> LaunchPlan:
    """Return a manifest that runs the program in the pods of a new job, and with `apply` the command that submits it.

    Raises: ConfigError for settings that Kubernetes would refuse, or that cannot be honoured there.
    """
    pods = plan_pods(request)
    settings: KubernetesSettings = pods.settings
    path = f"{pods.name}-{settings.kind}.yaml"
    documents = manifests(pods)
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


def manifests(pods: PodPlan) -> list[JsonObject]:
    """Return the objects of the job, in the order in which they are created."""
    match pods.settings.kind:
        case "jobset":
            return [_jobset(pods)]
        case "trainjob":
            return [_training_runtime(pods), _trainjob(pods)]
        case "pytorchjob":
            return [_pytorchjob(pods)]
        case other:
            assert_never(other)


def _yaml(document: JsonObject) -> str:
    # or PyYAML would write parts that occur twice as aliases
    unshared = json.loads(json.dumps(document))
    return yaml.safe_dump(unshared, sort_keys=False, width=120)


def _notes(pods: PodPlan, path: str) -> tuple[str, ...]:
    low, high = pods.min_pods, pods.max_pods
    count = f"{high} pod(s)" if low == high else f"{low} to {high} pods"
    notes = [
        f"{count} with {pods.processes} process(es) and {pods.gpus} GPU(s) each, as a {pods.settings.kind}"
    ]
    if pods.settings.volume is None:
        notes.append(
            "no volume: checkpoints must be saved outside the pods (an object store), or they end with them"
        )
    if pods.scrape_port is None and pods.serves_metrics:
        notes.append(
            "metrics are served inside the pod only (metrics_host and a fixed metrics_port decide), so no annotation asks to scrape it"
        )
    if pods.elastic and not pods.pod_restarts:
        notes.append(
            "max_restarts=0: losing a pod ends the job; set --max_restarts to continue with the others"
        )
    if not pods.settings.apply:
        notes.append(f"submit it with `kubectl apply -f {path}`, or add --apply")
    return tuple(notes)


# -- the three kinds -------------------------------------------------------------------------------------------------


def _jobset(pods: PodPlan) -> JsonObject:
    address = f"{pods.name}-{_JOB}-0-0.{pods.name}"
    env: list[JsonObject] = [
        {"name": "PET_NNODES", "value": str(pods.max_pods)},
        {"name": "PET_NPROC_PER_NODE", "value": str(pods.processes)},
        _from_field("PET_NODE_RANK", _INDEX),
        {"name": "PET_MASTER_ADDR", "value": address},
        {"name": "PET_MASTER_PORT", "value": str(pods.port)},
        _from_field("JOBSET_NAME", _JOBSET_LABEL.format("jobset-name")),
        _from_field("REPLICATED_JOB_NAME", _JOBSET_LABEL.format("replicatedjob-name")),
        _from_field("JOBSET_RESTART_ATTEMPT", _JOBSET_LABEL.format("restart-attempt")),
    ]
    job = {
        "parallelism": pods.max_pods,
        "completions": pods.max_pods,
        "completionMode": "Indexed",
        **_job_policy(),
        "template": _pod_template(pods, _container(pods, _JOB, env)),
    }
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": _metadata(pods),
        "spec": {
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            "failurePolicy": _failure_policy(pods),
            "replicatedJobs": [
                {
                    "name": _JOB,
                    "replicas": 1,
                    "template": {"spec": _with_stall_rule(pods, job)},
                },
            ],
        },
    }


def _training_runtime(pods: PodPlan) -> JsonObject:
    """Return the runtime of a TrainJob, which holds what a TrainJob itself cannot express: policies, volumes, the grace period."""
    settings: KubernetesSettings = pods.settings
    container: JsonObject = {
        "name": _JOB,
        "image": settings.image,
        **_env_from(pods),
        "volumeMounts": _mounts(pods),
    }
    if settings.working_dir is not None:
        container["workingDir"] = settings.working_dir
    template: JsonObject = {
        "metadata": {"labels": {f"{_TRAINER}/trainjob-ancestor-step": "trainer"}},
        "spec": _with_stall_rule(
            pods, {**_job_policy(), "template": _pod_template(pods, container)}
        ),
    }
    return {
        "apiVersion": f"{_TRAINER}/v1alpha1",
        "kind": "TrainingRuntime",
        "metadata": _metadata(pods, {f"{_TRAINER}/framework": "torch"}),
        "spec": {
            "mlPolicy": {"numNodes": pods.max_pods, "torch": {}},
            "template": {
                "spec": {
                    "network": {
                        "enableDNSHostnames": True,
                        "publishNotReadyAddresses": True,
                    },
                    "failurePolicy": _failure_policy(pods),
                    "replicatedJobs": [{"name": _JOB, "template": template}],
                }
            },
        },
    }


def _trainjob(pods: PodPlan) -> JsonObject:
    trainer: JsonObject = {
        "image": pods.settings.image,
        "command": _command(pods),
        "numNodes": pods.max_pods,
        "numProcPerNode": pods.processes,
    }
    if env := _env(pods):
        trainer["env"] = env
    if resources := _resources(pods):
        trainer["resourcesPerNode"] = resources
    return {
        "apiVersion": f"{_TRAINER}/v1alpha1",
        "kind": "TrainJob",
        "metadata": _metadata(pods),
        "spec": {
            "runtimeRef": {
                "apiGroup": _TRAINER,
                "kind": "TrainingRuntime",
                "name": pods.name,
            },
            "trainer": trainer,
        },
    }


def _pytorchjob(pods: PodPlan) -> JsonObject:
    """Return a PyTorchJob: a master and its workers; only workers if the number of pods may change."""
    port = {"name": _PYTORCH_PORT, "containerPort": pods.port}
    container = {**_container(pods, _PYTORCH, []), "ports": [port]}
    # ExitCode restarts a pod whose exit code is above 127; the launcher maps its codes accordingly.
    replica = {"restartPolicy": "ExitCode", "template": _pod_template(pods, container)}
    spec: JsonObject = {
        "runPolicy": {"cleanPodPolicy": "None"},
        "nprocPerNode": str(pods.processes),
    }
    if pods.elastic:
        spec["elasticPolicy"] = {
            "minReplicas": pods.min_pods,
            "maxReplicas": pods.max_pods,
            "rdzvBackend": "c10d",
            "rdzvHost": f"{pods.name}-worker-0",
            "rdzvPort": pods.port,
            "maxRestarts": pods.pod_restarts,
        }
        replicas = {"Worker": {"replicas": pods.max_pods, **replica}}
    else:
        replicas = {"Master": {"replicas": 1, **replica}}
        if pods.max_pods > 1:
            replicas["Worker"] = {"replicas": pods.max_pods - 1, **replica}
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": _metadata(pods),
        "spec": {**spec, "pytorchReplicaSpecs": replicas},
    }


# -- parts -----------------------------------------------------------------------------------------------------------


def _metadata(pods: PodPlan, more_labels: JsonObject | None = None) -> JsonObject:
    settings: KubernetesSettings = pods.settings
    metadata: JsonObject = {"name": pods.name}
    if settings.namespace is not None:
        metadata["namespace"] = settings.namespace
    metadata["labels"] = {**_labels(pods), **(more_labels or {})}
    if settings.annotations:
        metadata["annotations"] = _tags(settings.annotations)
    return metadata


def _labels(pods: PodPlan) -> dict[str, str]:
    labels = {
        "app.kubernetes.io/name": pods.name,
        "app.kubernetes.io/managed-by": "hasten",
    }
    return labels | _tags(pods.settings.labels)


def _tags(values: Mapping[str, Any]) -> dict[str, str]:
    return {key: tag_text(value) for key, value in values.items()}


def _pod_metadata(pods: PodPlan) -> JsonObject:
    """Return labels and annotations of a pod; those for Prometheus only if it can reach the metrics."""
    annotations = _tags(pods.settings.annotations)
    if pods.scrape_port is not None:
        annotations = {
            "prometheus.io/scrape": "true",
            "prometheus.io/port": str(pods.scrape_port),
            **annotations,
        }
    metadata: JsonObject = {"labels": _labels(pods)}
    return {**metadata, "annotations": annotations} if annotations else metadata


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


def _with_stall_rule(pods: PodPlan, job: JsonObject) -> JsonObject:
    """Return the Job with a rule for a stalled run (86), if it must not be restarted."""
    if pods.settings.on_stall == "restart":  # like any other failure
        return job
    stalled = {
        "action": "FailJob",
        "onExitCodes": {"operator": "In", "values": [STALLED]},
    }
    first_rule, *later_rules = job["podFailurePolicy"]["rules"]
    return {**job, "podFailurePolicy": {"rules": [first_rule, stalled, *later_rules]}}


def _failure_policy(pods: PodPlan) -> JsonObject:
    """Return the policy of the JobSet: all pods are restarted, unless a rule of a Job has ended it."""
    policy: JsonObject = {"maxRestarts": pods.max_restarts}
    if pods.settings.on_stall == "fail":
        policy["rules"] = [
            {
                "name": "stalled",
                "action": "FailJobSet",
                "onJobFailureReasons": ["PodFailurePolicy"],
            }
        ]
    return policy


def _pod_template(pods: PodPlan, container: JsonObject) -> JsonObject:
    settings: KubernetesSettings = pods.settings
    spec: JsonObject = {"terminationGracePeriodSeconds": pods.grace_s}
    # there the operator sets it from the replica's policy
    if settings.kind != "pytorchjob":
        spec["restartPolicy"] = "Never"
    if settings.service_account is not None:
        spec["serviceAccountName"] = settings.service_account
    if settings.pull_from:
        spec["imagePullSecrets"] = [{"name": name} for name in settings.pull_from]
    if settings.node_selector:
        spec["nodeSelector"] = _tags(settings.node_selector)
    spec |= settings.pod_spec
    memory = {
        "medium": "Memory",
        **({"sizeLimit": settings.shared_memory} if settings.shared_memory else {}),
    }
    volumes: list[JsonObject] = [{"name": "shared-memory", "emptyDir": memory}]
    if settings.volume is not None:
        volumes.append(
            {
                "name": "checkpoints",
                "persistentVolumeClaim": {"claimName": settings.volume},
            }
        )
    return {
        "metadata": _pod_metadata(pods),
        "spec": {**spec, "containers": [container], "volumes": volumes},
    }


def _container(pods: PodPlan, name: str, env: list[JsonObject]) -> JsonObject:
    settings: KubernetesSettings = pods.settings
    container: JsonObject = {
        "name": name,
        "image": settings.image,
        "command": _command(pods),
    }
    if settings.working_dir is not None:
        container["workingDir"] = settings.working_dir
    if variables := [*env, *_env(pods)]:
        container["env"] = variables
    container |= _env_from(pods)
    if resources := _resources(pods):
        container["resources"] = resources
    return {**container, "volumeMounts": _mounts(pods)}


def _command(pods: PodPlan) -> list[str]:
    return [_literal(word) for word in pods.command]


def _literal(text: str) -> str:
    """Return the text such that Kubernetes, which expands `$(NAME)` and `$$`, passes it on as it was given."""
    return text.replace("$", "$$")


def _env(pods: PodPlan) -> list[JsonObject]:
    return [
        {"name": name, "value": _literal(tag_text(value))}
        for name, value in pods.settings.env.items()
    ]


def _env_from(pods: PodPlan) -> JsonObject:
    names = pods.settings.env_from
    return (
        {"envFrom": [{"secretRef": {"name": name}} for name in names]} if names else {}
    )


def _from_field(name: str, path: str) -> JsonObject:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def _resources(pods: PodPlan) -> JsonObject:
    """Return requests equal to limits, so that a pod is the last to be evicted."""
    settings: KubernetesSettings = pods.settings
    amounts: JsonObject = {
        name: value
        for name, value in (("cpu", settings.cpu), ("memory", settings.memory))
        if value
    }
    if pods.gpus:
        amounts[settings.gpu_resource] = str(pods.gpus)
    amounts |= _tags(settings.resources)
    return {"requests": dict(amounts), "limits": dict(amounts)} if amounts else {}


def _mounts(pods: PodPlan) -> list[JsonObject]:
    mounts = [{"name": "shared-memory", "mountPath": "/dev/shm"}]
    if pods.settings.volume is not None:
        mounts.append({"name": "checkpoints", "mountPath": pods.settings.volume_path})
    return mounts
