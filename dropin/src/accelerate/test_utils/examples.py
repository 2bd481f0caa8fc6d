"""Comparison of example scripts."""

from accelerate._impl.testing.examples import *
