"""Whether a model drops elements at random."""

from __future__ import annotations

from typing import Final

from torch import nn

_DROPOUTS: Final = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


def may_draw(model: nn.Module) -> bool:
    """Whether any module has a dropout rate above zero, as a layer or as a number it hands to attention."""
    for module in model.modules():
        rates = [value for name, value in vars(module).items() if "drop" in name.lower() and isinstance(value, float)]
        if isinstance(module, _DROPOUTS):
            rates.append(module.p)
        if any(rate > 0 for rate in rates):
            return True
    return False
