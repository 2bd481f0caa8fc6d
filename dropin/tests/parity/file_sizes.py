"""Sizes as words and numbers."""

from accelerate.utils import convert_bytes, convert_file_size_to_int


def run() -> object:
    words = ["1GB", "1GiB", "200MB", "5KiB", "1.5GB", 42]
    found = []
    for word in words:
        try:
            found.append(convert_file_size_to_int(word))
        except ValueError as error:
            found.append(type(error).__name__)
    return [
        found,
        [convert_bytes(number) for number in (10, 2048, 5 * 2**20, 3 * 2**30)],
    ]


PROCESSES = (1,)
