"""Installing PyTorch/XLA in a notebook."""

from accelerate._impl.environment.versions import install_xla
