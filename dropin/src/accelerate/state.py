"""The states: process-wide views on the one ambient context."""

from accelerate._impl.views.state import *
