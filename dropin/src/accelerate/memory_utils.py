"""The old place of memory helpers."""

import warnings

from accelerate.utils.memory import find_executable_batch_size, release_memory

__all__ = ["find_executable_batch_size", "release_memory"]

_MOVED = "memory_utils has been reorganized to utils.memory. Import `find_executable_batchsize` from the main `__init__`: `from accelerate import find_executable_batch_size` to avoid this warning."
warnings.warn(_MOVED, FutureWarning, stacklevel=2)
