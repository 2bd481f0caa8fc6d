"""Settings of TPUs."""

from hasten.config.base import Absent, Section, SectionNames, setting, settings


@settings
class XLAConfig(Section):
    """Options of TPUs through torch_xla."""

    section_names = SectionNames(argument="xla", flag_prefix="", flag_group="TPU")
    absent = (
        Absent(
            "downcast_bf16",
            "this switch of torch_xla, which is deprecated there,",
            "set mixed_precision: bf16",
        ),
        Absent(
            "main_training_function",
            "starting a function of the script for each TPU core",
            "one process runs the script and drives all of them; leave it out",
        ),
    )

    fsdp_v2: bool = setting(
        False,
        "shard parameters and optimizer state over the devices (FSDPv2)",
        flag="xla_fsdp_v2",
    )
    downcast_bf16: bool = setting(False, "floats are bf16 and doubles fp32 on the TPU")
    main_training_function: str = setting(
        "main", "function of the script each TPU process starts"
    )
    tpu_name: str | None = setting(None, "name of the TPU")
    tpu_zone: str | None = setting(None, "zone of the TPU")
    tpu_use_cluster: bool = setting(
        False, "train on a pod over its TPU VMs", flags=("tpu_cluster",)
    )
    tpu_use_sudo: bool = setting(False, "run commands on the TPU VMs with sudo")
    tpu_vm: tuple[str, ...] | None = setting(
        None, "names of the TPU VMs", flags=("vm",)
    )
    tpu_env: tuple[str, ...] | None = setting(
        None, "variables set on the TPU VMs, NAME=VALUE", flags=("env",)
    )
    command_file: str | None = setting(
        None, "file of commands run on each TPU VM first", flag="tpu_command_file"
    )
    commands: tuple[str, ...] | None = setting(
        None,
        "commands run on each TPU VM first, one on each line",
        flag="tpu_commands",
        lines=True,
    )
