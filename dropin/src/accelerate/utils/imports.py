"""Probes: is a package, a device or a number format available?"""

from accelerate._impl.environment.packages import *
from accelerate._impl.environment.packages import __getattr__, _is_package_available
