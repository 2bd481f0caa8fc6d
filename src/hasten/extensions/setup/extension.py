"""What the extension offers: the commands `config` and `env`, and a function that writes a settings file."""

from __future__ import annotations

from typing import Final

from hasten.extension import Extension

extension: Final = Extension(
    name="setup",
    summary="settings files that suit the machine, and reports about both",
    commands={
        "config": "hasten.extensions.setup.config_command:main",
        "env": "hasten.extensions.setup.env_command:main",
    },
    command_help={
        "config": "write, show and check settings",
        "env": "print a report of this machine for an issue",
    },
    public_names={
        "write_basic_config": "hasten.extensions.setup.config_command:write_basic_config"
    },
)
