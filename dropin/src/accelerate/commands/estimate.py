"""`accelerate estimate-memory`, answered by hasten."""

from accelerate._impl.commands.estimate import *
