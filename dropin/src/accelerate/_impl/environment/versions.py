"""Comparing versions."""

from __future__ import annotations

from importlib import metadata

from packaging.version import Version, parse

from accelerate._impl.environment.constants import STR_OPERATION_TO_FUNC

torch_version = parse(metadata.version("torch"))


def compare_versions(library_or_version: str | Version, operation: str, requirement_version: str) -> bool:
    """Whether a library's version stands so to a required one."""
    if operation not in STR_OPERATION_TO_FUNC:
        raise ValueError(f"`operation` must be one of {list(STR_OPERATION_TO_FUNC)}, received {operation}")
    if isinstance(library_or_version, str):
        library_or_version = parse(metadata.version(library_or_version))
    return bool(STR_OPERATION_TO_FUNC[operation](library_or_version, parse(requirement_version)))


def is_torch_version(operation: str, version: str) -> bool:
    """Whether torch's version stands so to `version`."""
    return compare_versions(torch_version, operation, version)
