"""Replacing sections of an Accelerator's settings before its first model is prepared."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from accelerate.composed import Composed
from hasten.strategies.choose import choose


def rebuild(made: Composed, **sections: Any) -> None:  # Any: sections of every type
    """Let the Accelerator hold other settings, and the strategy they ask for."""
    made.config = replace(made.config, **sections)
    made.strategy = choose(made.config, made.ctx)
    made.saving._parts.unwrap, made.saving._parts.loops = made.strategy.unwrap, made.strategy
    made._preparer._config, made._preparer._strategy = made.config, made.strategy
