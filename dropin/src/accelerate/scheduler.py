"""AcceleratedScheduler: hasten's prepared scheduler, with the established way to count."""

from accelerate._impl.optim.scheduler import *
