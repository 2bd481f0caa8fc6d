"""Names of files; from `constants.json`, kinds and limits that scripts import."""

import json
import operator
from pathlib import Path
from typing import Any

from torch import nn

_CONVOLUTIONS = (
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
)
SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING = (*_CONVOLUTIONS, nn.Linear)
MODEL_NAME = "pytorch_model"  # quirk: ESTABLISHED_NAMES

_SIGNS = zip(
    [">", ">=", "==", "!=", "<=", "<"],
    ["gt", "ge", "eq", "ne", "le", "lt"],
    strict=True,
)
STR_OPERATION_TO_FUNC: dict[str, Any] = {
    sign: getattr(operator, name) for sign, name in _SIGNS
}
globals().update(json.loads(Path(__file__).with_suffix(".json").read_text()))


def __getattr__(name: str) -> Any:  # Any: type checkers take the file's values for it
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
