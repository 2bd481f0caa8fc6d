"""Starting training from a notebook or a test."""

from accelerate._impl.commands.launchers import *
from accelerate._impl.environment.constants import (
    ELASTIC_LOG_LINE_PREFIX_TEMPLATE_PYTORCH_VERSION,
)
