"""Contradictions between settings of DeepSpeed and others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from hasten.config.checks import Entries, Rule, at, contradiction
from hasten.config.root import Config
from hasten.errors import ConfigError
from hasten.extensions.deepspeed.settings import DeepSpeedPlugin


def check_offload(config: Config, entries: Entries) -> Iterator[ConfigError]:
    """Check that offload fits the ZeRO stage, NVMe has its folder, and DeepSpeed's file is not combined with single options."""
    ds = config.section(DeepSpeedPlugin)
    stage = at(config, entries, "deepspeed.zero_stage")
    if ds.hf_ds_config is not None:
        whole = at(config, entries, "deepspeed.hf_ds_config")
        for name in ("zero_stage", "offload_optimizer_device", "offload_param_device", "gradient_clipping"):
            single = entries.get(("deepspeed", name))
            if single and single.source.level >= whole.source.level and single.source.kind != "environment":
                yield contradiction(whole, single, "DeepSpeed's own configuration says it too", "say it in one place")
        return
    for part, lowest in (("param", 3), ("optimizer", 1)):
        device, folder = getattr(ds, f"offload_{part}_device"), getattr(ds, f"offload_{part}_nvme_path")
        entry = at(config, entries, f"deepspeed.offload_{part}_device")
        if device != "none" and ds.zero_stage < lowest:
            yield contradiction(entry, stage, f"this offload needs ZeRO stage {lowest}", f"set zero_stage: {lowest}")
        if (device == "nvme") != (folder is not None):
            other = at(config, entries, f"deepspeed.offload_{part}_nvme_path")
            yield contradiction(entry, other, "NVMe offload needs both device and folder", "set both or neither")
    if ds.zero3_init_flag and ds.zero_stage != 3:
        flag = at(config, entries, "deepspeed.zero3_init_flag")
        yield contradiction(flag, stage, "parameters are sharded by stage 3 only", "set zero_stage: 3")


RULES: Final[tuple[Rule, ...]] = (check_offload,)
