"""PartialState and AcceleratorState: process-wide views on the one ambient context."""

from accelerate._impl.views.gradient_state import *
from accelerate._impl.views.state import *
