"""The Accelerator with the established constructor and attributes, on top of hasten's."""

from accelerate._impl.accelerator.facade import *
from accelerate._impl.environment.constants import (
    MODEL_NAME,
    PROFILE_PATTERN_NAME,
    SCALER_NAME,
    WEIGHTS_NAME,
)
from accelerate._impl.trackers import LOGGER_TYPE_TO_CLASS
