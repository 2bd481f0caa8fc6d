"""`accelerate test`."""

from accelerate._impl.commands.test import *
