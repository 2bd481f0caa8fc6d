"""What the extension offers: trackers."""

from __future__ import annotations

from typing import Final

from hasten.extension import Extension

extension: Final = Extension(
    name="trackers",
    summary="trackers of TensorBoard, Weights & Biases, MLflow and other services",
    trackers={
        "aim": "hasten.extensions.trackers.aim:AimTracker",
        "clearml": "hasten.extensions.trackers.clearml:ClearmlTracker",
        "comet_ml": "hasten.extensions.trackers.comet_ml:CometTracker",
        "dvclive": "hasten.extensions.trackers.dvclive:DvcliveTracker",
        "mlflow": "hasten.extensions.trackers.mlflow:MlflowTracker",
        "swanlab": "hasten.extensions.trackers.swanlab:SwanlabTracker",
        "tensorboard": "hasten.extensions.trackers.tensorboard:TensorboardTracker",
        "trackio": "hasten.extensions.trackers.trackio:TrackioTracker",
        "wandb": "hasten.extensions.trackers.wandb:WandbTracker",
    },
)
