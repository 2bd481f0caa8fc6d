"""What the established launcher prepares for its processes: commands and environments, as data."""

import argparse
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from shutil import which
from typing import Any, Final

from accelerate._impl.enums import DistributedType, DynamoBackend, PrecisionType
from accelerate._impl.environment.constants import DEEPSPEED_MULTINODE_LAUNCHERS
from accelerate._impl.environment.packages import is_torch_xla_available
from accelerate._impl.environment.variables import (
    environment,
    get_free_port,
    get_int_from_env,
    is_port_in_use,
    str_to_bool,
)

# Any in this file: values of flags, and the caller's function.
_VARIABLES: Final[dict[str, dict[str, str]]] = json.loads(
    Path(__file__).with_name("launch_variables.json").read_text()
)
"""The variables of each group of settings, with the attribute that each shows; `given`: only where it has a value. Messages."""
_SAYS: Final = _VARIABLES["messages"]
_PORT: Final = 29500


@dataclass(eq=False, repr=False)
class PrepareForLaunch:
    """A function that reads its rank from its first argument, for multiprocessing."""

    launcher: Callable[..., Any]
    distributed_type: Any = "NO"
    debug: bool = False

    def __post_init__(self) -> None:
        self.distributed_type = DistributedType(self.distributed_type)

    def __call__(self, index: int, *args: Any) -> None:
        if self.distributed_type.value.startswith("MULTI_"):
            first_rank = get_int_from_env(["NPROC"], 1) * get_int_from_env(
                ["NODE_RANK"], 0
            )
            os.environ.update(LOCAL_RANK=str(index), RANK=str(first_rank + index))
        os.environ["FORK_LAUNCHED"] = "1"
        self.launcher(*args)


def env_var_path_add(env_var_name: str, path_to_add: str) -> str:
    return ":".join(
        [*filter(None, os.environ.get(env_var_name, "").split(":")), str(path_to_add)]
    )


def _argument_or(args: argparse.Namespace, name: str, otherwise: Any = None) -> Any:
    argument = getattr(args, name, None)
    return otherwise if argument is None else argument


def _shown_variables(args: argparse.Namespace, group: str) -> dict[str, str]:
    variables = {}
    for variable, (argument_name, *conversions) in (
        (variable_name, words.split())
        for variable_name, words in _VARIABLES[group].items()
    ):
        argument_value = getattr(args, argument_name, None)
        if argument_value is not None or "given" not in conversions:
            if "lower" in conversions:
                variables[variable] = str(argument_value).lower()
            else:
                variables[variable] = str(argument_value)
    return variables


def _common_variables(args: argparse.Namespace) -> dict[str, str]:
    """Return the variables that every kind of launch sets. Raises: ValueError for an unknown precision."""
    precision = str(_argument_or(args, "mixed_precision", "no")).lower()
    variables = {}
    if precision not in PrecisionType.list():
        raise ValueError(
            f"Unknown mixed_precision mode: {precision}. Choose between {PrecisionType.list()}."
        )
    variables["ACCELERATE_MIXED_PRECISION"] = precision
    if _argument_or(args, "debug"):
        variables["ACCELERATE_DEBUG_MODE"] = "true"
    if _argument_or(args, "gpu_ids", "all") != "all":
        variables["CUDA_VISIBLE_DEVICES"] = args.gpu_ids
    if _argument_or(args, "enable_cpu_affinity"):
        variables["ACCELERATE_CPU_AFFINITY"] = "1"
    if precision == "fp8":
        return setup_fp8_env(args, variables)
    return variables


def _compile_variables(args: argparse.Namespace) -> dict[str, str]:
    """Return the variables of compilation and threads. Raises: ValueError for an unknown backend."""
    backend = str(_argument_or(args, "dynamo_backend", "no")).upper()
    backend_names = [member.value for member in DynamoBackend]
    if backend not in backend_names:
        raise ValueError(
            f"Unknown dynamo backend: {backend}. Choose between {backend_names}."
        )
    threads = str(_argument_or(args, "num_cpu_threads_per_process", 1))
    return {
        "ACCELERATE_DYNAMO_BACKEND": backend,
        **_shown_variables(args, "dynamo"),
        "OMP_NUM_THREADS": threads,
    }


def _checked(args: argparse.Namespace) -> None:
    if _argument_or(args, "no_python") and _argument_or(args, "module"):
        raise ValueError("--module and --no_python cannot be used together")


def prepare_simple_launcher_cmd_env(
    args: argparse.Namespace,
) -> tuple[list[str], dict[str, str]]:
    """Return the command that runs the script in one process, or by `mpirun` where it has hosts, and its environment."""
    _checked(args)
    if _argument_or(args, "mpirun_hostfile"):
        mpi = _mpi_words(args)
    else:
        mpi = []
    if _argument_or(args, "no_python"):
        python = []
    else:
        python = [sys.executable, *(["-m"] if _argument_or(args, "module") else [])]
    cpu = _argument_or(args, "cpu") or _argument_or(args, "use_cpu", False)
    env = {
        **environment(),
        "ACCELERATE_USE_CPU": str(cpu),
        **_common_variables(args),
        **_compile_variables(args),
    }
    env |= (
        {"KMP_AFFINITY": "granularity=fine,compact,1,0", "KMP_BLOCKTIME": "1"}
        if cpu
        else {}
    )
    return [*mpi, *python, args.training_script, *args.training_script_args], {
        **env,
        **_set_address(args),
    }


def _set_address(args: argparse.Namespace) -> dict[str, str]:
    """Return the variables of the first process's address, where there are several. Raises: AssertionError if it is unknown."""
    if _argument_or(args, "num_machines", 1) > 1:
        assert _argument_or(args, "main_process_ip") is not None, _SAYS[
            "no_address"
        ].format("IP")
        assert _argument_or(args, "main_process_port") is not None, _SAYS[
            "no_address"
        ].format("port")
    elif _argument_or(args, "num_processes", 1) <= 1:
        return {}
    port = str(_argument_or(args, "main_process_port", _PORT))
    return {
        "MASTER_ADDR": _argument_or(args, "main_process_ip", "127.0.0.1"),
        "MASTER_PORT": port,
    }


def _mpi_words(args: argparse.Namespace) -> list[str]:
    """Return the words that start processes on the hosts of a file."""
    program, file, count, each, bound = _get_mpirun_args()
    words = [
        program,
        file,
        str(args.mpirun_hostfile),
        each,
        str(args.num_processes // args.num_machines),
    ]
    return [
        *words,
        count,
        str(args.num_processes),
        *([bound, "socket"] if bound else []),
    ]


def _get_mpirun_args() -> tuple[str, str, str, str, str]:
    """Return a program that starts processes and its flags: hosts, processes in all, per host, binding. Raises: OSError without one."""
    program = next(
        (program_name for program_name in ("mpirun", "mpiexec") if which(program_name)),
        None,
    )
    if program is None:
        raise OSError(_SAYS["no_mpi"])
    is_open_mpi = b"Open MPI" in subprocess.check_output([program, "--version"])
    if is_open_mpi:
        return (program, "--hostfile", "-n", "--npernode", "--bind-to")
    return (program, "-f", "-n", "-ppn", "")


def prepare_multi_gpu_env(args: argparse.Namespace) -> dict[str, str]:
    """Return the environment of the processes of a launch; `args` gets the attributes that torch's launcher reads."""
    _for_torchrun(args, _settled_port(args))
    env = {**environment(), **_common_variables(args), **_compile_variables(args)}
    if _argument_or(args, "use_fsdp"):
        if args.fsdp_cpu_ram_efficient_loading and not args.fsdp_sync_module_states:
            raise ValueError(_SAYS["unsynced"])
        env |= {"ACCELERATE_USE_FSDP": "true", **_shown_variables(args, "fsdp")}
    if _argument_or(args, "use_megatron_lm"):
        env |= {
            "ACCELERATE_USE_MEGATRON_LM": "true",
            **_shown_variables(args, "megatron_lm"),
        }
    if _argument_or(args, "use_parallelism_config"):
        return prepare_extend_env_parallelism_config(args, env)
    return env


def _settled_port(args: argparse.Namespace) -> int:
    """Return the port where processes meet. Raises: ConnectionError where it is taken and other machines look for it; as `_checked`."""
    machines = _argument_or(args, "num_machines", 1)
    port = _argument_or(args, "main_process_port", _PORT)
    args.main_process_port = port = int(get_free_port() if port == 0 else port)
    if (
        machines == 1 or int(_argument_or(args, "machine_rank", 0)) == 0
    ) and is_port_in_use(port):
        if machines > 1:
            raise ConnectionError(_SAYS["port_taken"].format(port))
        warnings.warn(_SAYS["standalone"].format(port), UserWarning, stacklevel=3)
        args.standalone = True
    _checked(args)
    return port


def _for_torchrun(args: argparse.Namespace, port: int) -> None:
    """Say in torch's words how many processes meet where."""
    machines = _argument_or(args, "num_machines", 1)
    args.nproc_per_node = str(_argument_or(args, "num_processes", 1) // machines)
    if machines == 1:
        args.master_port = str(port)
        return
    args.nnodes, args.node_rank = (
        str(machines),
        int(_argument_or(args, "machine_rank", 0)),
    )
    if _argument_or(args, "same_network"):
        args.master_addr = str(args.main_process_ip)
        args.master_port = str(port)
    else:
        args.rdzv_endpoint = (
            f"{_argument_or(args, 'main_process_ip', '127.0.0.1')}:{port}"
        )


def prepare_deepspeed_cmd_env(
    args: argparse.Namespace,
) -> tuple[list[str] | None, dict[str, str]]:
    """DeepSpeed's own command where it spans machines (else None: torch's launcher is used), and the environment."""
    port = _settled_port(args)
    args.deepspeed_multinode_launcher = _argument_or(
        args, "deepspeed_multinode_launcher", DEEPSPEED_MULTINODE_LAUNCHERS[0]
    )
    command = None
    if (
        _argument_or(args, "num_machines", 1) == 1
        or args.deepspeed_multinode_launcher == "standard"
    ):
        _for_torchrun(args, port)
    else:
        command = [
            *_deepspeed_words(args),
            args.training_script,
            *args.training_script_args,
        ]
    env = {
        **environment(),
        "PYTHONPATH": env_var_path_add("PYTHONPATH", str(Path.cwd())),
        **_common_variables(args),
    }
    env |= {
        "ACCELERATE_USE_DEEPSPEED": "true",
        "ACCELERATE_CONFIG_DS_FIELDS": "",
        **_shown_variables(args, "deepspeed"),
    }
    return command, prepare_extend_env_parallelism_config(args, env) if _argument_or(
        args, "use_parallelism_config"
    ) else env


def _deepspeed_words(args: argparse.Namespace) -> list[str]:
    launcher = str(args.deepspeed_multinode_launcher)
    words = ["deepspeed", "--hostfile", str(_argument_or(args, "deepspeed_hostfile"))]
    one_host = ["--node_rank", str(_argument_or(args, "machine_rank", 0)), "--no_ssh"]
    words += (
        one_host if launcher == "nossh" else ["--no_local_rank", "--launcher", launcher]
    )
    excluded_hosts = _argument_or(args, "deepspeed_exclusion_filter")
    included_hosts = _argument_or(args, "deepspeed_inclusion_filter")
    processes_per_machine = str(
        _argument_or(args, "num_processes", 1) // args.num_machines
    )
    if excluded_hosts:
        device_words = ["--exclude", excluded_hosts]
    elif included_hosts:
        device_words = ["--include", included_hosts]
    else:
        device_words = ["--num_gpus", processes_per_machine]
    words += list(map(str, device_words))
    for flag, argument_name in (
        ("--master_addr", "main_process_ip"),
        ("--master_port", "main_process_port"),
    ):
        if _argument_or(args, argument_name) is not None:
            words += [flag, str(getattr(args, argument_name))]
    if _argument_or(args, "module"):
        words.append("--module")
    elif _argument_or(args, "no_python"):
        words.append("--no_python")
    return words


def prepare_tpu(
    args: argparse.Namespace, current_env: dict[str, str], pod: bool = False
) -> tuple[argparse.Namespace, dict[str, str]]:
    if _argument_or(args, "mixed_precision") == "bf16" and is_torch_xla_available():
        current_env[
            "XLA_DOWNCAST_BF16"
            if _argument_or(args, "downcast_bf16")
            else "XLA_USE_BF16"
        ] = "1"
    if _argument_or(args, "debug"):
        current_env["ACCELERATE_DEBUG_MODE"] = "true"
    if pod:
        args.vm, args.tpu = _argument_or(args, "tpu_vm"), _argument_or(args, "tpu_name")
    return args, current_env


def setup_fp8_env(
    args: argparse.Namespace, current_env: dict[str, str]
) -> dict[str, str]:
    fp8_arguments = {}
    for name, value in vars(args).items():
        if name.startswith("fp8_") and value is not None:
            fp8_arguments[name] = value
    override_flags = fp8_arguments.pop("fp8_override_linear_precision", ())
    if isinstance(override_flags, str):
        override_flags = tuple(
            str_to_bool(flag.strip()) for flag in override_flags.split(",")
        )
    fp8_arguments |= dict(
        zip(
            (f"fp8_override_{name}" for name in ("fprop", "dgrad", "wgrad")),
            override_flags,
            strict=False,
        )
    )
    current_env.update(
        {
            f"ACCELERATE_{name.upper()}": str(value)
            for name, value in fp8_arguments.items()
        }
    )
    return current_env


def prepare_extend_env_parallelism_config(
    args: argparse.Namespace, current_env: dict[str, str]
) -> dict[str, str]:
    current_env.update(
        {
            "ACCELERATE_USE_PARALLELISM_CONFIG": "true",
            **_shown_variables(args, "parallelism"),
        }
    )
    for axis_name in ("cp", "sp"):
        if _argument_or(args, f"parallelism_config_{axis_name}_size", 1) > 1:
            current_env.update(_shown_variables(args, f"parallelism_{axis_name}"))
    return current_env


def prepare_sagemager_args_inputs(
    sagemaker_config: Any, args: argparse.Namespace
) -> tuple[dict[str, Any], dict[str, str] | None]:
    """Return the arguments of Amazon's estimator for this script, and the data channels of the job."""
    script = Path(args.training_script)
    if (
        _argument_or(args, "module")
        or _argument_or(args, "no_python")
        or script.suffix != ".py"
    ):
        raise ValueError(
            f'Your training script should be a python script and not "{args.training_script}"'
        )
    estimator_arguments = _VARIABLES["estimator"].items()
    words: dict[str, Any] = {}
    for argument_name, attribute in estimator_arguments:
        words[argument_name] = getattr(sagemaker_config, attribute)
    words |= {
        "entry_point": script.name,
        "source_dir": str(script.parent),
        "debugger_hook_config": False,
    }
    words |= {
        "hyperparameters": _convert_nargs_to_dict(args.training_script_args),
        **_job_arguments(sagemaker_config, args),
    }
    return {**words, **(sagemaker_config.additional_args or {})}, _read_table(
        sagemaker_config.sagemaker_inputs_file
    )


def _job_arguments(config: Any, args: argparse.Namespace) -> dict[str, Any]:
    """Return the job's settings of precision, processes and metrics."""
    compiling = {
        variable_name: variable_text
        for variable_name, variable_text in _compile_variables(args).items()
        if variable_name != "OMP_NUM_THREADS"
    }
    type_variable = "ACCELERATE_SAGEMAKER_DISTRIBUTED_TYPE"
    variable_text = config.distributed_type.value
    variables = {"ACCELERATE_USE_SAGEMAKER": "true", type_variable: variable_text}
    variables["ACCELERATE_MIXED_PRECISION"] = _common_variables(args)[
        "ACCELERATE_MIXED_PRECISION"
    ]
    measured = _read_table(config.sagemaker_metrics_file)
    spread = config.distributed_type == "DATA_PARALLEL"
    return {
        "environment": {**variables, **compiling},
        "distribution": {"smdistributed": {"dataparallel": {"enabled": True}}}
        if spread
        else None,
        "metric_definitions": None
        if measured is None
        else [{"Name": a, "Regex": b} for a, b in measured.items()],
    }


def _read_table(file: str | None) -> dict[str, str] | None:
    """Return the two columns of a tab-separated file below its heading; None without a file."""
    if not file:
        return None
    rows = []
    for line in Path(file).read_text().splitlines()[1:]:
        if line.strip():
            rows.append(line.split("\t"))
    return {
        column_name.strip(): column_value.strip() for column_name, column_value in rows
    }


def _convert_nargs_to_dict(nargs: list[str]) -> dict[str, Any]:
    """Pairs of `--name value`. Raises: ValueError for a flag without a value, which SageMaker cannot pass on."""
    parameters: dict[str, Any] = {}
    for index, word in enumerate(nargs):
        if not word.startswith("-"):
            continue
        if index + 1 == len(nargs) or nargs[index + 1].startswith("-"):
            raise ValueError(_SAYS["no_value"])
        parameters[word.lstrip("-").replace("-", "_")] = _parse_value(nargs[index + 1])
    return parameters


def _filter_args(
    args: argparse.Namespace, parser: argparse.ArgumentParser, default_args: Any = ()
) -> Any:
    """Return the arguments that another parser knows, with its defaults for `default_args` where there are none."""
    filtered_args, _ = parser.parse_known_args(list(default_args))
    for argument_name in vars(args):
        if hasattr(filtered_args, argument_name):
            setattr(filtered_args, argument_name, getattr(args, argument_name))
    return filtered_args


def _parse_value(word: str) -> Any:
    for kind in (int, float):
        with suppress(ValueError):
            return kind(word)
    return {"True": True, "False": False}.get(word, word)
