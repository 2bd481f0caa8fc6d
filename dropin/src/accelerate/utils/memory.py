"""Memory: what to do when it runs out, and giving it back."""

from accelerate._impl.models.memory import *
from hasten.optim.batch_size import should_reduce_batch_size
