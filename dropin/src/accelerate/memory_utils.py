"""The old place of memory helpers, which says where they are."""

import warnings

from accelerate._impl.surface.messages import message

warnings.warn(message("memory_utils_moved"), FutureWarning, stacklevel=2)
