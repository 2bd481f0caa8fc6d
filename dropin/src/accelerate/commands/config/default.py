"""A settings file for this machine, without questions."""

from accelerate._impl.commands.config import (
    default_command_parser,
    default_config_command,
    write_basic_config,
)
from accelerate._impl.settings.config_file import default_json_config_file
