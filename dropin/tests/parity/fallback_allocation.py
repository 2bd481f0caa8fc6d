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
    allocations = []
    for limit, unsplit_classes in (
        (50, None),
        (100, None),
        (20, None),
        (500, None),
        (1000, None),
        (100, ["Sequential"]),
        (30, ["Sequential"]),
    ):
        name, _, remaining_layers = fallback_allocate(
            list(model.named_children()), sizes, limit, unsplit_classes
        )
        allocations.append(
            [limit, name, [layer_name for layer_name, _ in remaining_layers]]
        )
    return allocations


PROCESSES = (1,)
