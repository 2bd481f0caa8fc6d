"""Settings of DeepSpeed."""

from collections.abc import Mapping
from typing import Any, Literal

from hasten.config.base import Absent, Section, SectionNames, setting, settings

Offload = Literal["none", "cpu", "nvme"]


@settings
class DeepSpeedPlugin(Section):
    """Options of DeepSpeed; `hf_ds_config` (a file or a mapping) overrides the single options, "auto" is filled in."""

    section_names = SectionNames(
        argument="deepspeed_plugin",
        strategy="deepspeed",
        mesh_settings=("cp_size", "sp_size"),
        rules="hasten.extensions.deepspeed.rules:RULES",
        flag_group="DeepSpeed",
    )
    absent = tuple(
        Absent(name, "offload to NVMe", "offload to the CPU", values)
        for name, values in (
            ("offload_optimizer_device", ("nvme",)),
            ("offload_param_device", ("nvme",)),
            ("offload_optimizer_nvme_path", ()),
            ("offload_param_nvme_path", ()),
        )
    )

    hf_ds_config: str | Mapping[str, Any] | None = setting(
        None,
        "DeepSpeed's own configuration: path or mapping",
        flags=("deepspeed_config_file",),
    )
    gradient_accumulation_steps: int | Literal["auto"] | None = setting(
        None, "micro-steps per update (default: ours)", minimum=1
    )
    gradient_clipping: float | Literal["auto"] | None = setting(
        None,
        "gradient norm DeepSpeed clips to",
        minimum=0,
        flags=("gradient_clipping",),
    )
    zero_stage: Literal[0, 1, 2, 3] = setting(
        2,
        "what is sharded: 1 optimizer, 2 + gradients, 3 + parameters",
        flags=("zero_stage",),
    )
    is_train_batch_min: bool = setting(
        True, "take the smallest loader's batch size when several are prepared"
    )
    offload_optimizer_device: Offload = setting(
        "none", "where the optimizer state lives", flags=("offload_optimizer_device",)
    )
    offload_param_device: Offload = setting(
        "none", "where parameters live (ZeRO-3)", flags=("offload_param_device",)
    )
    offload_optimizer_nvme_path: str | None = setting(
        None,
        "folder on NVMe for the optimizer state",
        flags=("offload_optimizer_nvme_path",),
    )
    offload_param_nvme_path: str | None = setting(
        None, "folder on NVMe for parameters", flags=("offload_param_nvme_path",)
    )
    zero3_init_flag: bool = setting(
        False,
        "shard parameters while the model is built (ZeRO-3)",
        flags=("zero3_init_flag",),
    )
    zero3_save_16bit_model: bool = setting(
        False,
        "gather 16-bit weights when saving (ZeRO-3)",
        flags=("zero3_save_16bit_model",),
    )
    transformer_moe_cls_names: tuple[str, ...] | None = setting(
        None,
        "mixture-of-experts classes kept whole (ZeRO-3 leaves)",
        flags=("deepspeed_moe_layer_cls_names",),
    )
    hostfile: str | None = setting(
        None, "DeepSpeed hostfile for many machines", path=True
    )
    exclusion_filter: str | None = setting(None, "DeepSpeed's --exclude")
    inclusion_filter: str | None = setting(None, "DeepSpeed's --include")
    multinode_launcher: Literal[
        "standard", "pdsh", "openmpi", "mvapich", "mpich", "slurm", "nossh"
    ] = setting("standard", "how DeepSpeed reaches other machines")
