"""Helpers for testing scripts: what its modules define, loaded on first use."""

from accelerate._impl.surface.lazy import lazy

__getattr__, __dir__ = lazy(__name__)
