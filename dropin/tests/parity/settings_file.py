"""A settings file written, read and changed."""

import tempfile
from pathlib import Path

from accelerate.commands.config.config_args import ClusterConfig, load_config_from_file


def run() -> object:
    with tempfile.TemporaryDirectory() as folder:
        file = str(Path(folder) / "c.yaml")
        config = ClusterConfig(
            compute_environment="LOCAL_MACHINE",
            distributed_type="MULTI_GPU",
            mixed_precision="bf16",
            use_cpu=False,
            debug=False,
            num_processes=4,
            machine_rank=0,
            num_machines=1,
        )
        config.to_yaml_file(file)
        loaded = load_config_from_file(file)
    return [
        loaded.num_processes,
        loaded.mixed_precision,
        str(loaded.distributed_type),
        sorted(loaded.to_dict())[:4],
    ]


PROCESSES = (1,)
