"""The Trainer: arguments, loop, evaluation, callbacks and metrics, built only on the Accelerator.

Start with `trainer.py`, then `loop.py` (an epoch) and `evaluation.py`; `arguments.py` and `settings.py` hold the user's settings.
The names in `__all__` are public.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from hasten.lazy import exports

if TYPE_CHECKING:
    from hasten.trainer.arguments import TrainingArguments as TrainingArguments
    from hasten.trainer.callbacks import EarlyStoppingCallback as EarlyStoppingCallback
    from hasten.trainer.callbacks import ProgressCallback as ProgressCallback
    from hasten.trainer.callbacks import TrainerCallback as TrainerCallback
    from hasten.trainer.collate import DataCollatorWithPadding as DataCollatorWithPadding
    from hasten.trainer.collate import default_data_collator as default_data_collator
    from hasten.trainer.evaluation import EvalPrediction as EvalPrediction
    from hasten.trainer.evaluation import PredictionOutput as PredictionOutput
    from hasten.trainer.loop import TrainOutput as TrainOutput
    from hasten.trainer.metrics import causal_lm_metrics as causal_lm_metrics
    from hasten.trainer.metrics import classification_metrics as classification_metrics
    from hasten.trainer.metrics import token_classification_metrics as token_classification_metrics
    from hasten.trainer.schedules import get_scheduler as get_scheduler
    from hasten.trainer.state import TrainerControl as TrainerControl
    from hasten.trainer.state import TrainerState as TrainerState
    from hasten.trainer.trainer import Trainer as Trainer

# public name -> the module that defines it
_PUBLIC: Final = MappingProxyType[str, str](
    {
        "TrainingArguments": "hasten.trainer.arguments",
        "EarlyStoppingCallback": "hasten.trainer.callbacks",
        "ProgressCallback": "hasten.trainer.callbacks",
        "TrainerCallback": "hasten.trainer.callbacks",
        "DataCollatorWithPadding": "hasten.trainer.collate",
        "default_data_collator": "hasten.trainer.collate",
        "EvalPrediction": "hasten.trainer.evaluation",
        "PredictionOutput": "hasten.trainer.evaluation",
        "TrainOutput": "hasten.trainer.loop",
        "causal_lm_metrics": "hasten.trainer.metrics",
        "classification_metrics": "hasten.trainer.metrics",
        "token_classification_metrics": "hasten.trainer.metrics",
        "get_scheduler": "hasten.trainer.schedules",
        "TrainerControl": "hasten.trainer.state",
        "TrainerState": "hasten.trainer.state",
        "Trainer": "hasten.trainer.trainer",
    }
)

__all__ = [*_PUBLIC]  # pyright: ignore[reportUnsupportedDunderAll]

if not TYPE_CHECKING:  # hidden from type checkers, which would otherwise accept any attribute
    __getattr__, __dir__ = exports(__name__, _PUBLIC)
