"""ParallelismConfig asks torch for a mesh of the active sizes by their names."""

from unittest.mock import MagicMock, patch

from accelerate import ParallelismConfig


def run() -> object:
    observations = []
    for sizes in (
        {"dp_replicate_size": 2, "dp_shard_size": 2},
        {"dp_shard_size": 4},
        {"dp_shard_size": 2, "cp_size": 2},
    ):
        with patch("torch.distributed.device_mesh.init_device_mesh") as init_mesh:
            init_mesh.return_value = mesh = MagicMock()
            built_mesh = ParallelismConfig(**sizes).build_device_mesh("cpu")
            called = [*init_mesh.call_args.args, *init_mesh.call_args.kwargs.values()]
            observations.append(
                [
                    built_mesh is mesh,
                    [
                        list(argument) if isinstance(argument, tuple) else argument
                        for argument in called
                    ],
                ]
            )
    return observations


PROCESSES = (1,)
