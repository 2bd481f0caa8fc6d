"""Sizes as words and numbers."""

from accelerate.utils import convert_bytes, convert_file_size_to_int


def run() -> object:
    words = ["1GB", "1GiB", "200MB", "5KiB", "1.5GB", 42]
    sizes = []
    for word in words:
        try:
            sizes.append(convert_file_size_to_int(word))
        except ValueError as error:
            sizes.append(type(error).__name__)
    return [
        sizes,
        [convert_bytes(number) for number in (10, 2048, 5 * 2**20, 3 * 2**30)],
    ]


PROCESSES = (1,)
