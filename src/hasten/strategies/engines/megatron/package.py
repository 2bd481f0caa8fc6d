"""megatron-core itself: which versions, how its modules are imported, and its warnings."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Final

from hasten.optional import need

VERSIONS: Final = ">=0.16,<0.17"
"""The versions of megatron-core whose optimizers and schedules this adapter was tried with."""


@contextmanager
def quiet() -> Iterator[None]:
    """A block without the engine's warnings about packages that it could use as well."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextmanager
def hushed() -> Iterator[None]:
    """A block without warnings that megatron-core's own files give; those of the user's code pass."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"megatron\.")
        warnings.filterwarnings(
            "ignore", message=r".torch\.distributed\.\w+. is deprecated"
        )  # names that torch 2.13 renamed
        yield


@cache  # steps ask for modules too, and reading the installed versions takes longer than a step
def package(name: str = "") -> Any:  # Any: megatron-core is untyped here
    """megatron.core, or a module of it. Raises: MissingPackageError when it is absent or of another version."""
    with quiet():
        need("megatron", VERSIONS, "strategy='megatron'")
        return need(f"megatron.core.{name}" if name else "megatron.core")
