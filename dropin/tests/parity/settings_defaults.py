"""Defaults of settings classes."""

from dataclasses import asdict

from accelerate.utils import (
    DataLoaderConfiguration,
    GradientAccumulationPlugin,
    ProjectConfiguration,
    TorchContextParallelConfig,
)


def run() -> object:
    made = [
        DataLoaderConfiguration(),
        ProjectConfiguration(),
        GradientAccumulationPlugin(),
        TorchContextParallelConfig(),
    ]
    return [{name: str(value) for name, value in asdict(one).items()} for one in made]


PROCESSES = (1,)
