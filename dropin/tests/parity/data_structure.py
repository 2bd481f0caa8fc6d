"""Shapes and dtypes of a nested container, and empty tensors made from them."""

import torch

from accelerate.utils import get_data_structure, initialize_tensors


def run() -> object:
    tree = {"a": torch.ones(2, 3), "b": [torch.zeros(1, dtype=torch.int64)]}
    found = get_data_structure(tree)
    made = initialize_tensors(found)
    return [
        str(found),
        [
            list(made["a"].shape),
            str(made["a"].dtype),
            list(made["b"][0].shape),
            str(made["b"][0].dtype),
        ],
    ]


PROCESSES = (1,)
