"""Versions compared by words."""

from accelerate.utils import compare_versions, is_torch_version


def run() -> object:
    return [
        compare_versions("torch", ">=", "1.0"),
        compare_versions("torch", "<", "1.0"),
        is_torch_version(">", "2.0"),
        is_torch_version("==", "1.2.3"),
    ]


PROCESSES = (1,)
