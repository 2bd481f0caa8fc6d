"""Comparing versions."""

from accelerate._impl.environment.versions import *
