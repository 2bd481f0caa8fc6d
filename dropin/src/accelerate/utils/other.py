"""Helpers that fit nowhere else in the established layout: unwrapping, saving, sizes, ports."""

from accelerate._impl.environment.constants import FSDP_PYTORCH_VERSION
from accelerate._impl.models.other import *
from hasten.runtime.bootstrap import warn_of_old_kernel as check_os_kernel
