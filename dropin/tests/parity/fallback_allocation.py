"""The first module that fits into what is left of a device."""

from torch import nn

from accelerate.utils import compute_module_sizes
from accelerate.utils.modeling import fallback_allocate


def run() -> object:
    model = nn.Sequential(
        nn.Linear(10, 10),
        nn.Sequential(nn.Linear(4, 4), nn.Linear(2, 2)),
        nn.Linear(3, 3),
    )
    sizes = compute_module_sizes(model)
    found = []
    for limit, kept in (
        (50, None),
        (100, None),
        (20, None),
        (500, None),
        (1000, None),
        (100, ["Sequential"]),
        (30, ["Sequential"]),
    ):
        name, _, rest = fallback_allocate(
            list(model.named_children()), sizes, limit, kept
        )
        found.append([limit, name, [one for one, _ in rest]])
    return found


PROCESSES = (1,)
