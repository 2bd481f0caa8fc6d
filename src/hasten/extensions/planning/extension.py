"""Predicted and measured settings of a training."""

from __future__ import annotations

from typing import Final

from hasten.extension import Extension

extension: Final = Extension(
    name="planning",
    summary="predicted and measured settings of a training",
    commands={
        "plan": "hasten.extensions.planning.plan.command:main",
        "tune": "hasten.extensions.planning.tune.command:main",
    },
    command_help={
        "plan": "find the fastest settings that fit a model on given GPUs, before the job starts",
        "tune": "find faster settings for a script on this machine by short real runs",
    },
)
