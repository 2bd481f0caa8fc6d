"""A device map that leaves a module out is refused."""

from torch import nn

from accelerate.utils import check_device_map


def run() -> object:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 5))
    check_device_map(model, {"0": 0, "1": 0, "2": "cpu"})
    try:
        check_device_map(model, {"0": 0})
    except ValueError as error:
        return [name in str(error) for name in ("1.weight", "2.weight")]
    return None


PROCESSES = (1,)
