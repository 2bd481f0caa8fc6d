"""Lists dealt out with padding."""

from accelerate import PartialState


def run() -> object:
    state, shares = PartialState(cpu=True), []
    for items in ([1, 2, 3], list("abcde"), [1]):
        for padding in (False, True):
            with state.split_between_processes(items, apply_padding=padding) as share:
                shares.append(share)
    return shares


PROCESSES = (1, 2)
