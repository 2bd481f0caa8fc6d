"""merge_dicts goes into dicts of dicts."""

from accelerate.utils import merge_dicts


def run() -> object:
    return merge_dicts({"a": {"x": 1}, "b": 2}, {"a": {"y": 3, "x": 0}, "c": 4})


PROCESSES = (1,)
