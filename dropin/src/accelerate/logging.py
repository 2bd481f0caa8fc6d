"""Loggers that speak on the main process."""

from accelerate._impl.views.logging import *
