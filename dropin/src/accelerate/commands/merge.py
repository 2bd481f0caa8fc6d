"""`accelerate merge-weights`: one model out of a sharded checkpoint, hasten's or torch's."""

from accelerate._impl.checkpoints.merge import *
