"""`accelerate config`: questions, defaults, updates."""

from accelerate._impl.commands.config import *
from accelerate._impl.commands.default import default_command_parser
from accelerate._impl.commands.update import update_command_parser
from accelerate._impl.settings.config_file import default_config_file, load_config_from_file
