"""The settings file in its established form."""

from accelerate._impl.settings.config_file import *
