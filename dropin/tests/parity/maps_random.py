"""Maps and budgets of random models and devices, most of which are not there: ties, buffers, unsplit blocks, fallback."""

import logging
import random
import warnings

import torch
from torch import nn

from accelerate.utils import (
    compute_module_sizes,
    get_balanced_memory,
    infer_auto_device_map,
)

DEVICES = [
    [0],
    [0, 1],
    [0, 1, 2],
    [0, "cpu"],
    [0, 1, "cpu"],
    ["cpu"],
    [1],
    ["mps", "cpu"],
]


class Block(nn.Module):
    def __init__(self, draw):
        super().__init__()
        self.first = nn.Linear(draw.randint(1, 6), draw.randint(1, 6))
        self.second = nn.BatchNorm1d(draw.randint(1, 5))
        if draw.random() < 0.4:
            self.scale = nn.Parameter(torch.zeros(draw.randint(1, 9)))


class Model(nn.Module):
    def __init__(self, draw):
        super().__init__()
        self.embed = nn.Embedding(draw.randint(2, 12), 4)
        self.blocks = nn.ModuleList([Block(draw) for _ in range(draw.randint(1, 5))])
        self.middle = nn.Sequential(
            nn.Linear(draw.randint(1, 6), 4), nn.ReLU(), Block(draw)
        )
        self.register_buffer("table", torch.zeros(draw.randint(1, 12)))
        self.head = nn.Linear(4, self.embed.num_embeddings, bias=False)
        if draw.random() < 0.5:
            self.head.weight = self.embed.weight


def one(seed):
    draw = random.Random(seed)
    model = Model(draw)
    total = compute_module_sizes(model)[""]
    sizes = [0, total, total // 2, total // 3, f"{total // 1000 + 1}KB"]
    limits = {
        key: draw.choice([*sizes, int(total * draw.random()), total * draw.random()])
        for key in draw.choice(DEVICES)
    }
    options = {
        "no_split_module_classes": draw.choice(
            [None, ["Block"], ["Block", "Sequential"]]
        )
    }
    if draw.random() < 0.2:
        options["dtype"] = draw.choice([torch.float16, "bfloat16", torch.int8])
    even = get_balanced_memory(
        model, dict(limits), low_zero=draw.random() < 0.3, **options
    )
    if draw.random() < 0.3:
        options["offload_buffers"] = True
    with warnings.catch_warnings(record=True) as caught_warnings:
        warnings.simplefilter("always")
        device_map = infer_auto_device_map(
            model, limits, clean_result=draw.random() < 0.5, **options
        )
    return [
        sorted((name, str(device)) for name, device in device_map.items()),
        {str(key): limit for key, limit in even.items()},
        {str(key): limit for key, limit in limits.items()},
        [str(warning.message) for warning in caught_warnings],
    ]


def run() -> object:
    logging.disable(logging.WARNING)  # of devices that are not there
    try:
        return [one(seed) for seed in range(120)]
    finally:
        logging.disable(logging.NOTSET)


PROCESSES = (1,)
