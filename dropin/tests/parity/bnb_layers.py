"""Linear layers exchanged for bitsandbytes', except inside modules that are named."""

from torch import nn

from accelerate.utils import BnbQuantizationConfig
from accelerate.utils.bnb import replace_with_bnb_layers


def run() -> object:
    found = []
    for kind in ("load_in_8bit", "load_in_4bit"):
        for kept in (None, ["1.1"], ["1"]):
            model = nn.Sequential(
                nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
            )
            made = replace_with_bnb_layers(
                model,
                BnbQuantizationConfig(**{kind: True}),
                modules_to_not_convert=kept,
            )
            found.append([type(part).__name__ for part in made.modules()])
    return found


PROCESSES = (1,)
