"""Seeds and random states."""

from accelerate._impl.views.random import *
