"""Names of tied parameters, and tying them again."""

import torch
from torch import nn

from accelerate.utils import find_tied_parameters, retie_parameters


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(4, 3), nn.Linear(3, 4, bias=False)
        self.head.weight = self.embed.weight


def run() -> object:
    model = Tied()
    tied_names = [sorted(names) for names in find_tied_parameters(model)]
    model.head.weight = nn.Parameter(torch.zeros(4, 3))
    retie_parameters(model, [["embed.weight", "head.weight"]])
    return [
        tied_names,
        model.head.weight is model.embed.weight,
        [sorted(group) for group in find_tied_parameters(nn.Linear(2, 2))],
    ]


PROCESSES = (1,)
