"""The Trainer: arguments, loop, evaluation, callbacks and metrics, built only on the Accelerator.

Start with `trainer.py`, then `loop.py` (an epoch) and `evaluation.py`; `arguments.py` and `settings.py` hold the user's settings.
The names in `__all__` are public.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from hasten.lazy import exports

if TYPE_CHECKING:
    from hasten.extensions.trainer.arguments import (
        TrainingArguments as TrainingArguments,
    )
    from hasten.extensions.trainer.callbacks import (
        EarlyStoppingCallback as EarlyStoppingCallback,
    )
    from hasten.extensions.trainer.callbacks import ProgressCallback as ProgressCallback
    from hasten.extensions.trainer.callbacks import TrainerCallback as TrainerCallback
    from hasten.extensions.trainer.collate import (
        DataCollatorWithPadding as DataCollatorWithPadding,
    )
    from hasten.extensions.trainer.collate import (
        default_data_collator as default_data_collator,
    )
    from hasten.extensions.trainer.evaluation import EvalPrediction as EvalPrediction
    from hasten.extensions.trainer.evaluation import (
        PredictionOutput as PredictionOutput,
    )
    from hasten.extensions.trainer.loop import TrainOutput as TrainOutput
    from hasten.extensions.trainer.metrics import (
        classification_metrics as classification_metrics,
    )
    from hasten.extensions.trainer.schedules import get_scheduler as get_scheduler
    from hasten.extensions.trainer.state import TrainerControl as TrainerControl
    from hasten.extensions.trainer.state import TrainerState as TrainerState
    from hasten.extensions.trainer.trainer import Trainer as Trainer

# public name -> the module that defines it
_PUBLIC: Final = MappingProxyType[str, str](
    {
        "TrainingArguments": "hasten.extensions.trainer.arguments",
        "EarlyStoppingCallback": "hasten.extensions.trainer.callbacks",
        "ProgressCallback": "hasten.extensions.trainer.callbacks",
        "TrainerCallback": "hasten.extensions.trainer.callbacks",
        "DataCollatorWithPadding": "hasten.extensions.trainer.collate",
        "default_data_collator": "hasten.extensions.trainer.collate",
        "EvalPrediction": "hasten.extensions.trainer.evaluation",
        "PredictionOutput": "hasten.extensions.trainer.evaluation",
        "TrainOutput": "hasten.extensions.trainer.loop",
        "classification_metrics": "hasten.extensions.trainer.metrics",
        "get_scheduler": "hasten.extensions.trainer.schedules",
        "TrainerControl": "hasten.extensions.trainer.state",
        "TrainerState": "hasten.extensions.trainer.state",
        "Trainer": "hasten.extensions.trainer.trainer",
    }
)

__all__ = [*_PUBLIC]  # pyright: ignore[reportUnsupportedDunderAll]

# hidden from type checkers, which would otherwise accept any attribute
if not TYPE_CHECKING:
    __getattr__, __dir__ = exports(__name__, _PUBLIC)
