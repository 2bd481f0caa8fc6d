"""Sharded models: saving and loading them by hand, names, and helpers other libraries call."""

from accelerate._impl.checkpoints.fsdp import *
from accelerate._impl.checkpoints.merge import merge_fsdp_weights
from accelerate._impl.environment.constants import (
    FSDP_MODEL_NAME,
    OPTIMIZER_NAME,
    SAFE_WEIGHTS_NAME,
    WEIGHTS_NAME,
)
