"""Defaults of settings classes."""

from dataclasses import asdict

from accelerate.utils import (
    DataLoaderConfiguration,
    GradientAccumulationPlugin,
    ProjectConfiguration,
    TorchContextParallelConfig,
)


def run() -> object:
    configurations = [
        DataLoaderConfiguration(),
        ProjectConfiguration(),
        GradientAccumulationPlugin(),
        TorchContextParallelConfig(),
    ]
    return [
        {name: str(value) for name, value in asdict(configuration).items()}
        for configuration in configurations
    ]


PROCESSES = (1,)
