"""What the launcher prepares for processes; hasten's launcher makes plans instead, so most of this only resolves."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from accelerate import notyet
from accelerate.utils.constants import DEEPSPEED_MULTINODE_LAUNCHERS

__all__ = ["DEEPSPEED_MULTINODE_LAUNCHERS"]
_PLANS = "the launcher's inner steps (`accelerate launch --dry_run` shows the plan that hasten makes instead)"


class PrepareForLaunch:
    """A function that reads its rank from its first argument, for multiprocessing."""

    def __init__(self, launcher: Callable[..., Any], distributed_type: str = "NO", debug: bool = False) -> None:
        self.launcher = launcher
        self.distributed_type = distributed_type
        self.debug = debug

    def __call__(self, index: int, *args: Any) -> None:  # Any: the function's own
        os.environ["LOCAL_RANK"] = os.environ["RANK"] = str(index)
        os.environ["FORK_LAUNCHED"] = "1"
        self.launcher(*args)


def env_var_path_add(env_var_name: str, path_to_add: str) -> str:
    """A variable of paths with one more."""
    paths = [path for path in os.environ.get(env_var_name, "").split(":") if path]
    return ":".join([*paths, str(path_to_add)])


prepare_deepspeed_cmd_env = notyet.function("utils.prepare_deepspeed_cmd_env", notyet.DEEPSPEED)
prepare_extend_env_parallelism_config = notyet.function("utils.prepare_extend_env_parallelism_config", _PLANS)
prepare_multi_gpu_env = notyet.function("utils.prepare_multi_gpu_env", _PLANS)
prepare_sagemager_args_inputs = notyet.function("utils.prepare_sagemager_args_inputs", notyet.SAGEMAKER)
prepare_simple_launcher_cmd_env = notyet.function("utils.prepare_simple_launcher_cmd_env", _PLANS)
prepare_tpu = notyet.function("utils.prepare_tpu", notyet.XLA)
setup_fp8_env = notyet.function("utils.setup_fp8_env", _PLANS)
