"""Contradictions between settings of DeepSpeed and others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from hasten.config.checks import Entries, Rule, at, entry_contradiction
from hasten.config.root import Config
from hasten.errors import ConfigError
from hasten.extensions.deepspeed.settings import DeepSpeedPlugin


def check_offload(config: Config, entries: Entries) -> Iterator[ConfigError]:
    """Check that offload fits the ZeRO stage, and DeepSpeed's file is not combined with single options."""
    plugin = config.section(DeepSpeedPlugin)
    stage = at(config, entries, "deepspeed.zero_stage")
    if plugin.hf_ds_config is not None:
        config_entry = at(config, entries, "deepspeed.hf_ds_config")
        for name in (
            "zero_stage",
            "offload_optimizer_device",
            "offload_param_device",
            "gradient_clipping",
        ):
            option_entry = entries.get(("deepspeed", name))
            if (
                option_entry
                and option_entry.source.level >= config_entry.source.level
                and option_entry.source.kind != "environment"
            ):
                yield entry_contradiction(
                    config_entry,
                    option_entry,
                    "DeepSpeed's own configuration says it too",
                    "say it in one place",
                )
        return
    for kind, lowest_stage in (("param", 3), ("optimizer", 1)):
        device_entry = at(config, entries, f"deepspeed.offload_{kind}_device")
        if device_entry.value != "none" and plugin.zero_stage < lowest_stage:
            yield entry_contradiction(
                device_entry,
                stage,
                f"this offload needs ZeRO stage {lowest_stage}",
                f"set zero_stage: {lowest_stage}",
            )
    if plugin.zero3_init_flag and plugin.zero_stage != 3:
        flag_entry = at(config, entries, "deepspeed.zero3_init_flag")
        yield entry_contradiction(
            flag_entry,
            stage,
            "parameters are sharded by stage 3 only",
            "set zero_stage: 3",
        )


RULES: Final[tuple[Rule, ...]] = (check_offload,)
