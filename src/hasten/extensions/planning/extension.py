"""Predicted and measured settings of a training."""

from __future__ import annotations

from types import MappingProxyType

from hasten.extension import Extension

extension = Extension(
    name="planning",
    summary="predicted and measured settings of a training",
    commands=MappingProxyType(
        {
            "plan": "hasten.extensions.planning.plan.command:main",
            "tune": "hasten.extensions.planning.tune.command:main",
        }
    ),
    command_help=MappingProxyType(
        {
            "plan": "find the fastest settings that fit a model on given GPUs, before the job starts",
            "tune": "find faster settings for a script on this machine by short real runs",
        }
    ),
)
