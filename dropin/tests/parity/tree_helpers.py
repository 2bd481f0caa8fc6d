"""Helpers on nested tensors."""

import torch

from accelerate.utils import (
    concatenate,
    convert_bytes,
    convert_to_fp32,
    find_batch_size,
    find_device,
    get_data_structure,
    honor_type,
    initialize_tensors,
    is_namedtuple,
    listify,
    pad_input_tensors,
    recursively_apply,
    send_to_device,
    slice_tensors,
)


def run() -> object:
    tree = {"a": torch.arange(3), "b": (torch.ones(3, 2), "word")}
    moved = send_to_device(tree, "cpu")
    shapes = recursively_apply(lambda x: list(x.shape), tree)
    joined = concatenate([{"a": torch.arange(2)}, {"a": torch.arange(1)}])
    initialized = initialize_tensors(get_data_structure({"a": torch.ones(2, 3)}))
    return [
        listify({"a": torch.arange(3)}),
        shapes["a"],
        shapes["b"][1],
        find_batch_size(tree),
        str(find_device(moved)),
        joined["a"].tolist(),
        slice_tensors({"a": torch.arange(4)}, slice(1, 3))["a"].tolist(),
        list(initialized["a"].shape),
        str(convert_to_fp32(torch.ones(1, dtype=torch.half)).dtype),
        honor_type((1, 2), [3, 4]),
        is_namedtuple((1,)),
        convert_bytes(123456789),
        pad_input_tensors(torch.ones(3), 3, 2).tolist(),
    ]


PROCESSES = (1,)
