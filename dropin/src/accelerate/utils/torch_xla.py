"""Installing PyTorch/XLA in a notebook."""

from accelerate._impl.environment.torch_xla import *
