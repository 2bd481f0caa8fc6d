"""The largest layer, and classes that are not split."""

from torch import nn

from accelerate.utils import (
    calculate_maximum_sizes,
    compute_module_sizes,
    get_max_layer_size,
)


def run() -> object:
    model = nn.Sequential(
        nn.Linear(3, 4), nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 6))
    )
    sizes = compute_module_sizes(model)
    largest = [
        get_max_layer_size(list(model.named_children()), sizes, unsplit_classes)
        for unsplit_classes in ([], ["Sequential"])
    ]
    total, (size, names) = calculate_maximum_sizes(model)
    return [
        [[layer_size, sorted(names)] for layer_size, names in largest],
        total,
        size,
        sorted(names),
    ]


PROCESSES = (1,)
