"""PartialState goes through pickle."""

import pickle

from accelerate import PartialState


def run() -> object:
    restored_state = pickle.loads(pickle.dumps(PartialState(cpu=True)))
    return [
        type(restored_state).__name__,
        restored_state.num_processes,
        restored_state.process_index,
    ]


PROCESSES = (1, 2)
