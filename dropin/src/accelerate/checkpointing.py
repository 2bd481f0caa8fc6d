"""Reading and writing the parts of a run's state by hand, and reading checkpoints the original package wrote."""

from accelerate._impl.checkpoints.by_hand import *
from accelerate._impl.environment.constants import *
