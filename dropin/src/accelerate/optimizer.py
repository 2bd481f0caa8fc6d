"""AcceleratedOptimizer: hasten's prepared optimizer under its established name."""

from accelerate._impl.optim.optimizer import *
from hasten.trees import to_device as move_to_device
