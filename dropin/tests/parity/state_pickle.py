"""PartialState goes through pickle."""

import pickle

from accelerate import PartialState


def run() -> object:
    again = pickle.loads(pickle.dumps(PartialState(cpu=True)))
    return [type(again).__name__, again.num_processes, again.process_index]


PROCESSES = (1, 2)
