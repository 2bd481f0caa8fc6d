"""Helpers that fit nowhere else in the established layout: unwrapping, saving, sizes, ports."""

from accelerate._impl.environment.constants import FSDP_PYTORCH_VERSION
from accelerate._impl.environment.variables import get_free_port, is_port_in_use
from accelerate._impl.models.other import *
