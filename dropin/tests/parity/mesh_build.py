"""ParallelismConfig asks torch for a mesh of the active sizes by their names."""

from unittest.mock import MagicMock, patch

from accelerate import ParallelismConfig


def run() -> object:
    found = []
    for sizes in (
        {"dp_replicate_size": 2, "dp_shard_size": 2},
        {"dp_shard_size": 4},
        {"dp_shard_size": 2, "cp_size": 2},
    ):
        with patch("torch.distributed.device_mesh.init_device_mesh") as asked:
            asked.return_value = mesh = MagicMock()
            made = ParallelismConfig(**sizes).build_device_mesh("cpu")
            called = [*asked.call_args.args, *asked.call_args.kwargs.values()]
            found.append(
                [
                    made is mesh,
                    [list(one) if isinstance(one, tuple) else one for one in called],
                ]
            )
    return found


PROCESSES = (1,)
