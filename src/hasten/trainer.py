"""`hasten.trainer`: the module name that users write for the extension of the same name."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hasten.extensions.trainer.arguments import (
        TrainingArguments as TrainingArguments,
    )  # type: ignore[import-not-found, unused-ignore]
    from hasten.extensions.trainer.callbacks import (
        EarlyStoppingCallback as EarlyStoppingCallback,
    )  # type: ignore[import-not-found, unused-ignore]
    from hasten.extensions.trainer.callbacks import ProgressCallback as ProgressCallback  # type: ignore[import-not-found, unused-ignore]
    from hasten.extensions.trainer.callbacks import TrainerCallback as TrainerCallback  # type: ignore[import-not-found, unused-ignore]
    from hasten.extensions.trainer.collate import (
        DataCollatorWithPadding as DataCollatorWithPadding,
    )  # type: ignore[import-not-found, unused-ignore]
    from hasten.extensions.trainer.collate import (
        default_data_collator as default_data_collator,
    )  # type: ignore[import-not-found, unused-ignore]
    from hasten.extensions.trainer.evaluation import EvalPrediction as EvalPrediction  # type: ignore[import-not-found, unused-ignore]
    from hasten.extensions.trainer.evaluation import (
        PredictionOutput as PredictionOutput,
    )  # type: ignore[import-not-found, unused-ignore]
    from hasten.extensions.trainer.loop import TrainOutput as TrainOutput  # type: ignore[import-not-found, unused-ignore]
    from hasten.extensions.trainer.metrics import (
        classification_metrics as classification_metrics,
    )  # type: ignore[import-not-found, unused-ignore]
    from hasten.extensions.trainer.schedules import get_scheduler as get_scheduler  # type: ignore[import-not-found, unused-ignore]
    from hasten.extensions.trainer.state import TrainerControl as TrainerControl  # type: ignore[import-not-found, unused-ignore]
    from hasten.extensions.trainer.state import TrainerState as TrainerState  # type: ignore[import-not-found, unused-ignore]
    from hasten.extensions.trainer.trainer import Trainer as Trainer  # type: ignore[import-not-found, unused-ignore]
else:
    from hasten.extensions.trainer import __all__, __dir__, __getattr__  # noqa: F401
