"""What the extension offers: a launch target with its settings, and reports of progress."""

from __future__ import annotations

from typing import Final

from hasten.extension import Extension

extension: Final = Extension(
    name="kubernetes",
    summary="Kubernetes: manifests of JobSet and TrainJob; progress of a TrainJob",
    launch_targets={"kubernetes": "hasten.extensions.kubernetes.manifests:TARGET"},
    settings={
        "launch.kubernetes": "hasten.extensions.kubernetes.settings:KubernetesSettings"
    },
    run_parts={"trainjob": "hasten.extensions.kubernetes.trainjob:TrainJobPart"},
    run_part_settings={"trainjob": "$KUBEFLOW_TRAINER_SERVER_URL"},
)
