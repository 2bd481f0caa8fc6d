"""Bytes of one number of a dtype."""

import torch

from accelerate.utils import CustomDtype, dtype_byte_size


def run() -> object:
    kinds = [
        torch.float32,
        torch.float16,
        torch.int64,
        torch.uint8,
        CustomDtype.FP8,
        CustomDtype.INT4,
        torch.bool,
    ]
    return [dtype_byte_size(kind) for kind in kinds]


PROCESSES = (1,)
