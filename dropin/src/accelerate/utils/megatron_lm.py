"""Megatron-LM: stand-ins that scripts give to prepare(), and losses and tensors over data-parallel processes."""

from accelerate._impl.optim.megatron import *
