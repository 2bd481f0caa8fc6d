"""Sizes and names of a ParallelismConfig."""

from accelerate import ParallelismConfig


def run() -> object:
    numbers = []
    for sizes in (
        {},
        {"dp_replicate_size": 2, "dp_shard_size": 2, "tp_size": 2},
        {"dp_shard_size": 2, "cp_size": 4},
    ):
        config = ParallelismConfig(**sizes)
        numbers.append(
            [
                config.total_size,
                config.non_data_parallel_size,
                config.data_parallel_size,
                config.dp_dim_names,
                config.non_dp_dim_names,
                config.dp_shard_cp_dim_names,
                config.dp_cp_dim_names,
                config.fsdp_dim_names,
                config.active_mesh_dims,
                config.tp_enabled,
                config.cp_enabled,
            ]
        )
    return numbers


PROCESSES = (1,)
