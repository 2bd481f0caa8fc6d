"""Linear layers exchanged for bitsandbytes', except inside modules that are named."""

from torch import nn

from accelerate.utils import BnbQuantizationConfig
from accelerate.utils.bnb import replace_with_bnb_layers


def run() -> object:
    layer_types = []
    for kind in ("load_in_8bit", "load_in_4bit"):
        for skipped_modules in (None, ["1.1"], ["1"]):
            model = nn.Sequential(
                nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
            )
            replaced = replace_with_bnb_layers(
                model,
                BnbQuantizationConfig(**{kind: True}),
                modules_to_not_convert=skipped_modules,
            )
            layer_types.append([type(module).__name__ for module in replaced.modules()])
    return layer_types


PROCESSES = (1,)
