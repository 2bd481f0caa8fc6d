"""A model that fits goes to one device."""

from torch import nn

from accelerate import infer_auto_device_map


def run() -> object:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 5))
    return [dict(infer_auto_device_map(model, max_memory={"cpu": 10_000}))]


PROCESSES = (1,)
