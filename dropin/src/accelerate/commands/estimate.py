"""`accelerate estimate-memory`: the sizes of a model on the Hub."""

from accelerate._impl.commands.estimate import *
