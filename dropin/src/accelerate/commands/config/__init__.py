"""`accelerate config`: questions, defaults, updates."""

from accelerate._impl.commands.config import *
