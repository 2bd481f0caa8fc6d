"""AcceleratedOptimizer: hasten's prepared optimizer under its established name."""

from accelerate._impl.optim.optimizer import *
