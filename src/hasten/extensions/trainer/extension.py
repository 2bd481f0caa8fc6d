"""What the extension offers: public names."""

from __future__ import annotations

from typing import Final

from hasten.extension import Extension

extension: Final = Extension(
    name="trainer",
    summary="the Trainer: training without writing a loop",
    public_names={
        "EarlyStoppingCallback": "hasten.extensions.trainer.callbacks:EarlyStoppingCallback",
        "Trainer": "hasten.extensions.trainer.trainer:Trainer",
        "TrainerCallback": "hasten.extensions.trainer.callbacks:TrainerCallback",
        "TrainingArguments": "hasten.extensions.trainer.arguments:TrainingArguments",
    },
)
