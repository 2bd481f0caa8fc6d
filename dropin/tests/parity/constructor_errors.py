"""Messages of wrong constructor arguments."""

from accelerate import Accelerator
from accelerate.utils import AutocastKwargs, GradientAccumulationPlugin


def run() -> object:
    errors = []
    wrong = (
        {"mixed_precision": "fp32"},
        {
            "gradient_accumulation_steps": 2,
            "gradient_accumulation_plugin": GradientAccumulationPlugin(num_steps=3),
        },
        {"kwargs_handlers": [AutocastKwargs(), AutocastKwargs()]},
        {"kwargs_handlers": ["x"]},
    )
    for kwargs in wrong:
        try:
            Accelerator(cpu=True, **kwargs)
        except (ValueError, AssertionError) as error:
            errors.append(
                [
                    type(error).__name__,
                    str(error).replace("accelerate.utils.dataclasses.", ""),
                ]
            )
    return errors


PROCESSES = (1, 2)
