"""A settings file written again with today's keys."""

from accelerate._impl.commands.update import *
