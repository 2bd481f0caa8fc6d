"""Memory: what to do when it runs out, and giving it back."""

from accelerate._impl.models.memory import *
