"""Smaller batches while memory runs out."""

from accelerate.utils import find_executable_batch_size


def run() -> object:
    tried = []

    @find_executable_batch_size(starting_batch_size=64)
    def train(batch_size):
        tried.append(batch_size)
        if batch_size > 40:
            raise RuntimeError("CUDA out of memory.")
        return batch_size

    result = train()

    def never(batch_size):
        raise RuntimeError("CUDA out of memory.")

    try:
        find_executable_batch_size(never, starting_batch_size=4)()
    except RuntimeError as error:
        return [tried, result, str(error)]
    return None


PROCESSES = (1,)
