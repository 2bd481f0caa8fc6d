"""gather_object and broadcast_object_list."""

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object


def run() -> object:
    rank = Accelerator(cpu=True).process_index
    return [
        gather_object([{"rank": rank}, "x"]),
        broadcast_object_list([rank, "from main"]),
    ]


PROCESSES = (1, 2)
