"""What the established launcher prepares for its processes: commands and environments, as data."""

import argparse
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerate._impl.commands.launch_flags import words_of
from accelerate._impl.commands.launch_variables import settings_for, spelled, spelled_in_full
from accelerate._impl.enums import DistributedType
from accelerate._impl.environment.constants import DEEPSPEED_MULTINODE_LAUNCHERS
from accelerate._impl.environment.packages import is_torch_xla_available
from accelerate._impl.environment.variables import environment, str_to_bool
from hasten.config.base import default_of
from hasten.config.sections.loop import TERecipeKwargs

# Any in this file: values of flags, and the caller's function.
_TE = ("use_autocast_during_eval", "margin", "interval", "fp8_format", "amax_history_len", "amax_compute_algo")
_FP8 = {name.removeprefix("fp8_"): default_of(TERecipeKwargs, name) for name in _TE} | {
    "backend": None,
    "opt_level": "O2",
    "enable_fsdp_float8_all_gather": 1,
    "pad_inner_dim": 1,
}
_PARALLEL = ("dp_replicate_size", "dp_shard_size", "tp_size", "cp_size", "cp_backend", "sp_size", "sp_backend")
_PORT = 29500
_NO_VALUE = "SageMaker doesn’t support argparse actions for `store_true` or `store_false`. Please define explicit types"
_ESTIMATOR = {
    **{name: name for name in ("image_uri", "transformers_version", "pytorch_version", "py_version", "base_job_name")},
    "role": "iam_role_name",
    "instance_count": "num_machines",
    "instance_type": "ec2_instance_type",
}


@dataclass(eq=False, repr=False)
class PrepareForLaunch:
    """A function that reads its rank from its first argument, for multiprocessing."""

    launcher: Callable[..., Any]
    distributed_type: Any = "NO"
    debug: bool = False

    def __post_init__(self) -> None:
        self.distributed_type = DistributedType(self.distributed_type)

    def __call__(self, index: int, *args: Any) -> None:
        if self.distributed_type != DistributedType.NO:
            os.environ["LOCAL_RANK"] = os.environ["RANK"] = str(index)
        os.environ["FORK_LAUNCHED"] = "1"
        self.launcher(*args)


def env_var_path_add(env_var_name: str, path_to_add: str) -> str:
    """A variable of paths with one more."""
    paths = [path for path in os.environ.get(env_var_name, "").split(":") if path]
    return ":".join([*paths, str(path_to_add)])


def _asked(args: argparse.Namespace, name: str, otherwise: Any = None) -> Any:
    found = getattr(args, name, None)
    return otherwise if found is None else found


def prepare_simple_launcher_cmd_env(args: argparse.Namespace) -> tuple[list[str], dict[str, str]]:
    """The command that runs the script in one process, and its environment."""
    if _asked(args, "no_python") and _asked(args, "module"):
        raise ValueError("--module and --no_python cannot be used together")
    python = [] if _asked(args, "no_python") else [sys.executable, *(["-m"] if _asked(args, "module") else [])]
    env = _with_devices(args, {**environment(), **spelled_in_full(settings_for(words_of(args)))})
    if _asked(args, "num_processes", 1) > 1:
        env.setdefault("MASTER_ADDR", _asked(args, "main_process_ip", "127.0.0.1"))
        env.setdefault("MASTER_PORT", str(_asked(args, "main_process_port", _PORT)))
    return [*python, args.training_script, *args.training_script_args], env


def _with_devices(args: argparse.Namespace, env: dict[str, str]) -> dict[str, str]:
    """The environment with the devices that the script sees, and the options of fp8 where it computes so."""
    if _asked(args, "gpu_ids", "all") != "all":
        env["CUDA_VISIBLE_DEVICES"] = args.gpu_ids
    return setup_fp8_env(args, env) if _asked(args, "mixed_precision") == "fp8" else env


def prepare_multi_gpu_env(args: argparse.Namespace) -> dict[str, str]:
    """The environment of the processes of a launch; `args` gets the attributes that torch's launcher reads."""
    _for_torchrun(args)
    return {**environment(), **spelled_in_full(settings_for(words_of(args)))}


def _for_torchrun(args: argparse.Namespace) -> None:
    """Say in torch's words how many processes meet where."""
    machines, port = _asked(args, "num_machines", 1), _asked(args, "main_process_port", _PORT)
    args.nproc_per_node = str(max(_asked(args, "num_processes", 1) // machines, 1))
    if machines == 1:
        args.master_port = str(port)
        return
    args.nnodes, args.node_rank = str(machines), int(_asked(args, "machine_rank", 0))
    args.rdzv_endpoint = f"{_asked(args, 'main_process_ip', '127.0.0.1')}:{port}"


def prepare_deepspeed_cmd_env(args: argparse.Namespace) -> tuple[list[str] | None, dict[str, str]]:
    """DeepSpeed's own command where it spans machines (else None: torch's launcher is used), and the environment."""
    args.use_deepspeed = True
    found = {**environment(), **spelled(settings_for(words_of(args)))}
    found["ACCELERATE_MIXED_PRECISION"] = _asked(args, "mixed_precision", "no")
    found["PYTHONPATH"] = env_var_path_add("PYTHONPATH", str(Path.cwd()))
    launcher = _asked(args, "deepspeed_multinode_launcher", DEEPSPEED_MULTINODE_LAUNCHERS[0])
    if _asked(args, "num_machines", 1) == 1 or launcher == "standard":
        _for_torchrun(args)
        return None, found
    return [*_deepspeed_words(args, str(launcher)), args.training_script, *args.training_script_args], found


def _deepspeed_words(args: argparse.Namespace, launcher: str) -> list[str]:
    """DeepSpeed's own launcher and its flags."""
    hosts = str(_asked(args, "deepspeed_hostfile"))
    words = ["deepspeed", "--hostfile", hosts, "--no_local_rank", "--launcher", launcher]
    left_out, taken = _asked(args, "deepspeed_exclusion_filter"), _asked(args, "deepspeed_inclusion_filter")
    each = str(_asked(args, "num_processes", 1) // args.num_machines)
    chosen = ["--exclude", left_out] if left_out else ["--include", taken] if taken else ["--num_gpus", each]
    words += [str(one) for one in chosen]
    for flag, name in (("--master_addr", "main_process_ip"), ("--master_port", "main_process_port")):
        words += [flag, str(getattr(args, name))] if _asked(args, name) is not None else []
    return words + (["--module"] if _asked(args, "module") else ["--no_python"] if _asked(args, "no_python") else [])


def prepare_tpu(
    args: argparse.Namespace, current_env: dict[str, str], pod: bool = False
) -> tuple[argparse.Namespace, dict[str, str]]:
    """The arguments and the environment of a job on TPUs."""
    if _asked(args, "mixed_precision") == "bf16" and is_torch_xla_available():
        current_env["XLA_DOWNCAST_BF16" if _asked(args, "downcast_bf16") else "XLA_USE_BF16"] = "1"
    if _asked(args, "debug"):
        current_env["ACCELERATE_DEBUG_MODE"] = "true"
    if pod:
        args.vm, args.tpu = _asked(args, "tpu_vm"), _asked(args, "tpu_name")
    return args, current_env


def setup_fp8_env(args: argparse.Namespace, current_env: dict[str, str]) -> dict[str, str]:
    """The environment with the options of fp8."""
    for name, otherwise in _FP8.items():
        current_env[f"ACCELERATE_FP8_{name.upper()}"] = str(_asked(args, f"fp8_{name}", otherwise))
    parts = _asked(args, "fp8_override_linear_precision", (False, False, False))
    if isinstance(parts, str):
        parts = tuple(str_to_bool(one.strip()) for one in parts.split(","))
    for name, value in zip(("FPROP", "DGRAD", "WGRAD"), parts, strict=True):
        current_env[f"ACCELERATE_FP8_OVERRIDE_{name}"] = str(value)
    return current_env


def prepare_extend_env_parallelism_config(args: argparse.Namespace, current_env: dict[str, str]) -> dict[str, str]:
    """The environment with the sizes of the mesh."""
    otherwise = {"cp_backend": "torch", "sp_backend": "deepspeed"}
    current_env["ACCELERATE_USE_PARALLELISM_CONFIG"] = "true"
    for name in _PARALLEL:
        value = _asked(args, f"parallelism_config_{name}", otherwise.get(name, 1))
        current_env[f"PARALLELISM_CONFIG_{name.upper()}"] = str(value)
    return current_env


def prepare_sagemager_args_inputs(
    sagemaker_config: Any, args: argparse.Namespace
) -> tuple[dict[str, Any], dict[str, str] | None]:
    """What an estimator of Amazon's SDK is given for this script, and the data channels of the job."""
    script = Path(args.training_script)
    if _asked(args, "module") or _asked(args, "no_python") or script.suffix != ".py":
        raise ValueError(f'Your training script should be a python script and not "{args.training_script}"')
    words: dict[str, Any] = {name: getattr(sagemaker_config, attribute) for name, attribute in _ESTIMATOR.items()}
    words |= {"entry_point": script.name, "source_dir": str(script.parent), "debugger_hook_config": False}
    words |= {"hyperparameters": _convert_nargs_to_dict(args.training_script_args), **_job(sagemaker_config)}
    return {**words, **(sagemaker_config.additional_args or {})}, _table(sagemaker_config.sagemaker_inputs_file)


def _job(config: Any) -> dict[str, Any]:
    """What the job is told of its precision, its processes and what to measure."""
    variables = {"ACCELERATE_USE_SAGEMAKER": "true", "ACCELERATE_MIXED_PRECISION": str(config.mixed_precision)}
    measured = _table(config.sagemaker_metrics_file)
    spread = "DATA_PARALLEL" in str(config.distributed_type).upper()
    return {
        "environment": variables,
        "distribution": {"smdistributed": {"dataparallel": {"enabled": True}}} if spread else None,
        "metric_definitions": None if measured is None else [{"Name": a, "Regex": b} for a, b in measured.items()],
    }


def _table(file: str | None) -> dict[str, str] | None:
    """The two columns of a tab-separated file below its heading; None without a file."""
    if not file:
        return None
    rows = [line.split("\t") for line in Path(file).read_text().splitlines()[1:] if line.strip()]
    return {name.strip(): value.strip() for name, value in rows}


def _convert_nargs_to_dict(nargs: list[str]) -> dict[str, Any]:
    """Pairs of `--name value`. Raises: ValueError for a flag without a value, which SageMaker cannot pass on."""
    found: dict[str, Any] = {}
    for at, word in enumerate(nargs):
        if not word.startswith("-"):
            continue
        if at + 1 == len(nargs) or nargs[at + 1].startswith("-"):
            raise ValueError(_NO_VALUE)
        found[word.lstrip("-").replace("-", "_")] = _value(nargs[at + 1])
    return found


def _filter_args(args: argparse.Namespace, parser: argparse.ArgumentParser, default_args: Any = ()) -> Any:
    """The arguments that another parser knows, with its defaults for `default_args` where there are none."""
    known, _ = parser.parse_known_args(list(default_args))
    for name in vars(args):
        if hasattr(known, name):
            setattr(known, name, getattr(args, name))
    return known


def _value(word: str) -> Any:
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            continue
    return {"True": True, "False": False, "true": True, "false": False}.get(word, word)
