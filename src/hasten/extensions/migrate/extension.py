"""Migration of scripts from Accelerate."""

from __future__ import annotations

from types import MappingProxyType

from hasten.extension import Extension

extension = Extension(
    name="migrate",
    summary="migration of scripts from accelerate",
    commands=MappingProxyType(
        {
            "migrate": "hasten.extensions.migrate.command:main",
        }
    ),
    command_help=MappingProxyType(
        {
            "migrate": "print the diff that converts scripts from accelerate to hasten, and the differences in behaviour",
        }
    ),
)
