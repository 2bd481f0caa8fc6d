"""The old place of `accelerate config`."""

from accelerate.commands.config import (
    config_command,
    config_command_parser,
    get_config_parser,
    main,
)
