"""Runs that continue when replicas are lost."""

from __future__ import annotations

from typing import Final

from hasten.extension import Extension

extension: Final = Extension(
    name="survive",
    summary="runs that continue when replicas are lost",
    run_parts={"survive": "hasten.extensions.survive.part:Survive"},
    public_names={"survival_report": "hasten.extensions.survive.part:survival_report"},
    run_part_settings={"survive": "survive"},
    settings={"survive": "hasten.extensions.survive.settings:SurviveSettings"},
    launch_targets={
        "replicas": "hasten.extensions.survive.launch_target:LAUNCH_TARGET"
    },
)
