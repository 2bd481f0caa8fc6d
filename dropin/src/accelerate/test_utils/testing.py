"""Helpers for testing scripts: launch commands, skips, temporary folders."""

from accelerate._impl.testing.cases import *
