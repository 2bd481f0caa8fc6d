"""A settings file for this machine, without questions."""

from accelerate._impl.commands.default import *
from accelerate._impl.settings.config_file import default_json_config_file
