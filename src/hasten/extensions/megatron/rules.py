"""Contradictions between settings of Megatron-LM and others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from hasten.config.checks import Entries, Rule, at, entry_contradiction
from hasten.config.root import Config
from hasten.errors import ConfigError
from hasten.extensions.megatron.settings import MegatronLMPlugin


def check_sizes(config: Config, entries: Entries) -> Iterator[ConfigError]:
    """Check that Megatron's sizes divide the number of processes."""
    sizes = config.section(MegatronLMPlugin)
    total = config.launch.num_processes
    if config.strategy != "megatron" or not total:
        return
    product = sizes.tp_degree * sizes.pp_degree
    if total % product:
        yield entry_contradiction(
            at(config, entries, "megatron.tp_degree"),
            at(config, entries, "launch.num_processes"),
            f"tp_degree {sizes.tp_degree} × pp_degree {sizes.pp_degree} = {product} does not fit",
            f"use a multiple of {product} processes",
        )


RULES: Final[tuple[Rule, ...]] = (check_sizes,)
