"""A tiny regression to train in tests."""

from accelerate._impl.testing.training import *
