"""Views on weights by prefix and by submodule."""

import torch

from accelerate.utils import PrefixedDataset, extract_submodules_state_dict


def run() -> object:
    state = {
        "a.x": torch.ones(1),
        "a.y": torch.zeros(1),
        "b.x": torch.ones(2),
        "ab": torch.ones(3),
    }
    return [
        sorted(extract_submodules_state_dict(state, ["a"])),
        PrefixedDataset(state, "a.")["x"].tolist(),
    ]


PROCESSES = (1,)
