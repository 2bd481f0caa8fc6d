"""What the extension offers: the command `hasten test`."""

from __future__ import annotations

from typing import Final

from hasten.extension import Extension

extension: Final = Extension(
    name="selfcheck",
    summary="check that training works under the current settings",
    commands={"test": "hasten.extensions.selfcheck.command:main"},
    command_help={"test": "check that training works under the current settings"},
)
