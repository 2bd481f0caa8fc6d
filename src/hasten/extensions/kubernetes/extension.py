"""Declaration of the extension: reports of progress to Kubeflow's TrainJob."""

from hasten.extension import Extension

extension = Extension(
    name="kubernetes",
    summary="reports of progress to Kubeflow's TrainJob",
    run_parts={"trainjob": "hasten.progress.trainjob:TrainJobPart"},
    run_part_settings={"trainjob": "$KUBEFLOW_TRAINER_SERVER_URL"},
)
