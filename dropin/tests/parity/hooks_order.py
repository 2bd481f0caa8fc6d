"""Hooks around a forward, one or several, replaced and removed."""

import torch
from torch import nn

from accelerate.hooks import (
    ModelHook,
    SequentialHook,
    add_hook_to_module,
    remove_hook_from_module,
)


class Add(ModelHook):
    def __init__(self, number):
        self.number = number

    def pre_forward(self, module, *args, **kwargs):
        return (args[0] + self.number, *args[1:]), kwargs

    def post_forward(self, module, output):
        return output * self.number


def run() -> object:
    torch.manual_seed(0)
    model, x = nn.Linear(2, 2), torch.ones(1, 2)
    observations = [model(x).tolist()]
    add_hook_to_module(model, Add(2))
    observations.append(model(x).tolist())
    add_hook_to_module(model, Add(3))
    observations.append(model(x).tolist())
    add_hook_to_module(model, Add(2), append=True)
    observations += [model(x).tolist(), isinstance(model._hf_hook, SequentialHook)]
    remove_hook_from_module(model)
    return [
        *observations,
        model(x).tolist(),
        hasattr(model, "_hf_hook"),
        hasattr(model, "_old_forward"),
    ]


PROCESSES = (1,)
