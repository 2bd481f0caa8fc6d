"""Shapes and dtypes of a nested container, and empty tensors made from them."""

import torch

from accelerate.utils import get_data_structure, initialize_tensors


def run() -> object:
    tree = {"a": torch.ones(2, 3), "b": [torch.zeros(1, dtype=torch.int64)]}
    structure = get_data_structure(tree)
    initialized = initialize_tensors(structure)
    return [
        str(structure),
        [
            list(initialized["a"].shape),
            str(initialized["a"].dtype),
            list(initialized["b"][0].shape),
            str(initialized["b"][0].dtype),
        ],
    ]


PROCESSES = (1,)
