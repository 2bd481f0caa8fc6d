"""Contradictions between settings of Megatron-LM and others."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Final

from hasten.config.checks import Entries, Rule, at, contradiction
from hasten.config.root import Config
from hasten.errors import ConfigError
from hasten.extensions.megatron.settings import MegatronLMPlugin


def check_sizes(config: Config, entries: Entries) -> Iterator[ConfigError]:
    """Check that Megatron's sizes divide the number of processes."""
    sizes, total = config.section(MegatronLMPlugin), config.launch.num_processes
    if config.strategy != "megatron" or not total:
        return
    inside = sizes.expert_tensor_parallel_size or sizes.tp_degree
    for parts in (
        {
            "tp_degree": sizes.tp_degree,
            "pp_degree": sizes.pp_degree,
            "context_parallel_size": sizes.context_parallel_size,
        },
        {
            "expert_tensor_parallel_size": inside,
            "pp_degree": sizes.pp_degree,
            "expert_model_parallel_size": sizes.expert_model_parallel_size,
        },
    ):
        product = prod(parts.values())
        if total % product:
            widest = max(parts, key=parts.__getitem__)
            blamed = at(config, entries, f"megatron.{widest}")
            count = at(config, entries, "launch.num_processes")
            shown = " × ".join(f"{name} {size}" for name, size in parts.items())
            yield contradiction(
                blamed,
                count,
                f"{shown} = {product} does not fit",
                f"use a multiple of {product} processes",
            )
            return


RULES: Final[tuple[Rule, ...]] = (check_sizes,)
