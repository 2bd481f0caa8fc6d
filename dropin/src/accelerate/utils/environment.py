"""Reading and patching the process's environment, and looking at the machine."""

from accelerate._impl.environment.variables import *
