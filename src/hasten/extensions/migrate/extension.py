"""Migration of scripts from Accelerate."""

from __future__ import annotations

from typing import Final

from hasten.extension import Extension

extension: Final = Extension(
    name="migrate",
    summary="migration of scripts from accelerate",
    commands={
        "migrate": "hasten.extensions.migrate.command:main",
    },
    command_help={
        "migrate": "print the diff that converts scripts from accelerate to hasten, and the differences in behaviour",
    },
)
