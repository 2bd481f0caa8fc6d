"""Weights written to a folder and read back."""

import tempfile

import torch

from accelerate.utils import (
    OffloadedWeightsLoader,
    load_offloaded_weight,
    offload_state_dict,
    offload_weight,
)


def run() -> object:
    with tempfile.TemporaryDirectory() as folder:
        index = offload_weight(torch.arange(4.0), "x", folder, index={})
        offload_weight(torch.tensor(3.0), "y", folder, index=index)
        loaded_weight = load_offloaded_weight(f"{folder}/x.dat", index["x"])
        state_folder = f"{folder}/state"
        offload_state_dict(
            state_folder, {"a": torch.ones(2), "b": torch.zeros(1, dtype=torch.float16)}
        )
        loader = OffloadedWeightsLoader(
            state_dict={"c": torch.full((1,), 2.0)}, save_folder=state_folder
        )
        return [
            index,
            [float(number) for number in loaded_weight],
            sorted(loader),
            [loader[name].tolist() for name in sorted(loader)],
            len(loader),
        ]


PROCESSES = (1,)
