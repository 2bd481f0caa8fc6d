"""A settings file written again with today's keys."""

from accelerate._impl.commands.config import (
    update_command_parser,
    update_config,
    update_config_command,
)
