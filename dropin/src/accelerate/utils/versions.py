"""Comparing versions."""

from accelerate._impl.environment.versions import (
    compare_versions,
    is_torch_version,
    torch_version,
)
