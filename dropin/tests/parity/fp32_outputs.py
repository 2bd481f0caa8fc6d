"""Half precision outputs as float32, other dtypes as they are."""

import torch

from accelerate.utils import convert_outputs_to_fp32, convert_to_fp32


def run() -> object:
    tree = {
        "a": torch.ones(1, dtype=torch.float16),
        "b": [torch.ones(1, dtype=torch.bfloat16), torch.ones(1, dtype=torch.int64)],
    }
    converted = convert_to_fp32(tree)
    wrapped = convert_outputs_to_fp32(lambda: tree)
    return [
        str(converted["a"].dtype),
        str(converted["b"][0].dtype),
        str(converted["b"][1].dtype),
        str(wrapped()["a"].dtype),
    ]


PROCESSES = (1,)
