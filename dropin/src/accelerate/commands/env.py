"""`accelerate env`."""

from accelerate._impl.commands.env import *
