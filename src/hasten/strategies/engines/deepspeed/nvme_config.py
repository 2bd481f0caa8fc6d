"""Offload to NVMe in DeepSpeed's configuration: what is checked, and what is set because of it. Pure."""

from __future__ import annotations

from typing import Any, Final

from hasten.errors import ConfigError

# Any in this file: DeepSpeed's own keys and values.
_KEPT_WHOLE: Final = 2**18 - 1
"""The largest parameter whose part is smaller than 1 MiB in any precision."""


def check(config: dict[str, Any], part: str, stage: int, notes: list[str]) -> None:
    """Check offload to NVMe; with the optimizer's state there, give every parameter a sub-group of its own.

    DeepSpeed 0.19 reads gradients into one buffer for the parameters of a sub-group. A read to an address that is not a multiple
    of the drive's blocks of 512 bytes fails there without an error, and the update uses what the buffer held before.
    """
    zero = config["zero_optimization"]
    name = f"zero_optimization.offload_{part}"
    if stage != 3:
        raise ConfigError(
            f"{name}.device='nvme' needs stage 3, but the stage is {stage}, so nothing would be moved to the drive. Set "
            "zero_optimization.stage to 3, or use device='cpu'."
        )
    section = zero[f"offload_{part}"]
    if not section.get("nvme_path"):
        what = "the optimizer's state has" if part == "optimizer" else "parameters have"
        raise ConfigError(
            f"{name}.device='nvme' has no nvme_path, so {what} no place. Add nvme_path, a folder on the drive."
        )
    if part == "param":
        _parameters(config, section, notes)
        return
    for key in ("pipeline_read", "pipeline_write"):
        if section.get(key) is True:
            raise ConfigError(
                f"{name}.{key}=True cannot be honoured: masters and moments may still be on their way to the drive when a checkpoint "
                f"reads them. Remove {key}."
            )
        section.pop(key, None)
    if zero.get("sub_group_size") != 1:
        notes.append(
            "zero_optimization.sub_group_size: 1 (with several parameters in a sub-group DeepSpeed 0.19 loses gradients on NVMe)"
        )
        zero["sub_group_size"] = 1


def _parameters(config: dict[str, Any], section: dict[str, Any], notes: list[str]) -> None:
    """Options of the files that hold parameters, which are hasten's own."""
    zero = config["zero_optimization"]
    name = "zero_optimization.offload_param"
    if (zero.get("offload_optimizer") or {}).get("fast_init"):
        raise ConfigError(
            "zero_optimization.offload_optimizer.fast_init=True cannot be honoured with parameters on NVMe: DeepSpeed would make the "
            "masters from files of its own, and hasten keeps parameters in others. Remove fast_init."
        )
    if section.pop("buffer_size", None) is not None:
        notes.append(f"{name}.buffer_size: not used (memory for a part is as large as the part)")
    if "aio" in config:
        notes.append("aio: for the optimizer's state alone (parameters are read and written by hasten)")
    if "max_in_cpu" not in section:
        section["max_in_cpu"] = 0
        notes.append(f"{name}.max_in_cpu: 0 (DeepSpeed would keep the first 1e9 elements in host memory)")


def keep_small_whole(config: dict[str, Any], notes: list[str]) -> None:
    """Keep no parameter whole whose part is on NVMe: DeepSpeed cannot write into it there."""
    zero = config["zero_optimization"]
    kept = zero.get("stage3_param_persistence_threshold", 0)
    if kept > _KEPT_WHOLE:
        zero["stage3_param_persistence_threshold"] = _KEPT_WHOLE
        notes.append(
            f"zero_optimization.stage3_param_persistence_threshold: {_KEPT_WHOLE} (parts of larger parameters may be on NVMe)"
        )
